/* Seeds, policies, faults, counters and reports; and what happens at the door of every call. */
#include "internal.h"

#include <signal.h>
#include <time.h>
#include <unistd.h>

enum mutant stand_mutant;
int stand_initialised;
char stand_policy_now = 'd';

static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static uint64_t seed = 1, state = 1;
static double deadline = 10000;
static int loading_waits;
static pid_t owner;
static CUresult sticky;

static struct {
  char name[48];
  long calls;
} counters[128];
static struct {
  char name[48];
  int left, code;
} faults[16];
static struct {
  char *text;
  size_t length;
  int count;
} found;

void stand_lock(void) { pthread_mutex_lock(&lock); }
void stand_unlock(void) { pthread_mutex_unlock(&lock); }

void lock_wait(double milliseconds) {
  struct timespec end;
  uint64_t at = now() + (uint64_t)(milliseconds * 1e6);
  end.tv_sec = (time_t)(at / 1000000000u);
  end.tv_nsec = (long)(at % 1000000000u);
  pthread_cond_clockwait(&changed, &lock, CLOCK_MONOTONIC, &end);
}

void stand_sleep(double milliseconds) {
  struct timespec t = {(time_t)(milliseconds / 1e3), (long)(milliseconds * 1e6) % 1000000000L};
  nanosleep(&t, NULL);
}

/* ---- chance ---- */

void stand_seed(uint64_t s) {
  stand_lock();
  seed = s;
  state = s * 0x9e3779b97f4a7c15u;
  stand_unlock();
}

uint64_t stand_seed_now(void) { return seed; }

uint64_t stand_random(void) { /* splitmix64 */
  uint64_t z = (state += 0x9e3779b97f4a7c15u);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  return z ^ (z >> 31);
}

int stand_policy(const char *policy) {
  if (strcmp(policy, "eager") && strcmp(policy, "lazy") && strcmp(policy, "drawn")) return -1;
  stand_lock();
  stand_policy_now = policy[0];
  stand_poke();
  stand_unlock();
  return 0;
}

int stand_is_lazy(void) { return stand_policy_now == 'l'; }
void stand_deadline(double milliseconds) { deadline = milliseconds; }
double stand_deadline_now(void) { return deadline; }

/* ---- reports ---- */

void stand_found(const char *format, ...) {
  static const char *names[] = {"drawn", "eager", "lazy"};
  char line[1024];
  const char *quiet = getenv("STAND_QUIET");
  int n;
  va_list arguments;
  stand_lock();
  va_start(arguments, format);
  n = vsnprintf(line, sizeof line - 64, format, arguments);
  va_end(arguments);
  if (n > (int)sizeof line - 65) n = (int)sizeof line - 65;
  n += snprintf(line + n, 64, " [%s, seed %llu]\n",
                names[stand_policy_now == 'e'   ? 1
                      : stand_policy_now == 'l' ? 2
                                                : 0],
                (unsigned long long)seed);
  found.text = realloc(found.text, found.length + (size_t)n + 1);
  memcpy(found.text + found.length, line, (size_t)n + 1);
  found.length += (size_t)n;
  found.count++;
  stand_unlock();
  if (!quiet || !atoi(quiet)) fprintf(stderr, "stand-in: %s", line);
}

int stand_reports(void) { return found.count; }

size_t stand_report(char *text, size_t size) {
  stand_lock();
  if (size) snprintf(text, size, "%s", found.text ? found.text : "");
  stand_unlock();
  return found.length;
}

void stand_clear(void) {
  stand_lock();
  found.length = 0;
  found.count = 0;
  if (found.text) found.text[0] = 0;
  stand_unlock();
}

/* ---- faults and counters ---- */

static int same_call(const char *call, const char *name) {
  size_t n = strlen(name);
  return !strncmp(call, name, n) && (!call[n] || !strncmp(call + n, "_v", 2));
}

void stand_fail(const char *call, int n, int code) {
  stand_lock();
  for (int i = 0; i < 16; i++)
    if (!faults[i].left) {
      snprintf(faults[i].name, sizeof faults[i].name, "%s", call);
      faults[i].left = n;
      faults[i].code = code;
      break;
    }
  stand_unlock();
}

long stand_calls(const char *call) {
  long n = 0;
  for (int i = 0; i < 128 && counters[i].name[0]; i++)
    if (same_call(counters[i].name, call)) n += counters[i].calls;
  return n;
}

int stand_injected(const char *call) {
  int code = 0;
  stand_lock();
  for (int i = 0; i < 128; i++) {
    if (!counters[i].name[0]) snprintf(counters[i].name, sizeof counters[i].name, "%s", call);
    if (strcmp(counters[i].name, call)) continue;
    counters[i].calls++;
    break;
  }
  for (int i = 0; i < 16 && !code; i++)
    if (faults[i].left && same_call(call, faults[i].name) && !--faults[i].left) code = faults[i].code;
  stand_unlock();
  if (code == STAND_KILL) kill(getpid(), SIGKILL);
  if (code == STAND_STOP) kill(getpid(), SIGSTOP), code = 0;
  while (code == STAND_HANG) pause();
  return code;
}

/* ---- the door ---- */

void stand_loading_waits(int yes) { loading_waits = yes; }

void stand_sticky(CUresult code) { sticky = code; }

CUresult stand_enter(const char *call, int kind) {
  int code;
  if (owner && owner != getpid()) {
    fprintf(stderr, "stand-in: %s was called in a child of the process that initialised CUDA\n", call);
    abort();
  }
  code = stand_injected(call);
  stand_lock();
  if (!owner && stand_initialised) owner = getpid();
  if (code >= 700 && code < 720) sticky = (CUresult)code; /* the context is lost */
  if (!code && !stand_initialised && !(kind & BEFORE_INIT)) code = CUDA_ERROR_NOT_INITIALIZED;
  if (!code && sticky && !(kind & BEFORE_INIT)) code = (int)sticky;
  if (!code && (kind & NEEDS_CONTEXT) && !context_current()) code = CUDA_ERROR_INVALID_CONTEXT;
  if (!code && (kind & UNSAFE)) code = (int)capture_forbids();
  if (!code && (kind & LOADS) && loading_waits) {
    uint64_t end = now() + (uint64_t)(deadline * 1e6);
    for (stream *s = streams; s; s = s->next)
      if (s->last) operation_demand(s->last);
    while (streams_busy() && now() < end) lock_wait(1);
    if (streams_busy())
      stand_found("deadlock: %s loads or allocates, and waits for streams that do not become empty", call);
  }
  if (code) stand_unlock();
  return (CUresult)code;
}

CUresult stand_leave(CUresult code) {
  stand_unlock();
  return code;
}

/* What the environment sets; read when the library is loaded, so that programs need not know the stand-in. */
__attribute__((constructor)) static void read_environment(void) {
  static const char *mutants[] = {
#define X(name) #name,
      MUTANTS(X)
#undef X
  };
  const char *value;
  char text[512], *rest = text, *one;
  stand_seed((value = getenv("STAND_SEED")) ? strtoull(value, NULL, 10) : 1);
  if ((value = getenv("STAND_POLICY")) && stand_policy(value))
    fprintf(stderr, "stand-in: no policy %s\n", value), _exit(70);
  if ((value = getenv("STAND_DEADLINE"))) deadline = strtod(value, NULL);
  if ((value = getenv("STAND_LOADING_WAITS"))) loading_waits = atoi(value);
  if ((value = getenv("STAND_MUTANT"))) {
    unsigned i = 0;
    while (i < sizeof mutants / sizeof *mutants && strcmp(mutants[i], value)) i++;
    if (i == sizeof mutants / sizeof *mutants) fprintf(stderr, "stand-in: no mutant %s\n", value), _exit(70);
    stand_mutant = (enum mutant)i;
  }
  snprintf(text, sizeof text, "%s", (value = getenv("STAND_FAIL")) ? value : ""); /* call:n:code,... */
  while ((one = strsep(&rest, ",")) && *one) {
    char *call = strsep(&one, ":"), *n = strsep(&one, ":");
    if (!n || !one) fprintf(stderr, "stand-in: STAND_FAIL is call:n:code,...\n"), _exit(70);
    stand_fail(call, atoi(n),
               !strcmp(one, "hang")   ? STAND_HANG
               : !strcmp(one, "kill") ? STAND_KILL
               : !strcmp(one, "stop") ? STAND_STOP
                                      : atoi(one));
  }
}
