/* Sums of NCCL in graphs, as frozen passes have them: captured on a side stream, launched again and again, and gone before
 * their communicator. NCCL's guide, "Using NCCL with CUDA Graphs": captures and launches are collective, and all ranks make
 * them in the same order.
 *
 * There are two ranks if they can be: on two devices, or on one, which NCCL allows from 2.30 on. Else there is one. The other
 * rank is a process that runs the same program: LITMUS_NCCL_ID tells it what the communicator is known by.
 */
#include "programs.h"

#include "engine_ext/gpu/nccl.h"

#include <dlfcn.h>
#include <signal.h>
#include <spawn.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

enum { SHARES_DEVICES = 23000, STEPS = 3 };
static const char *const ID = "LITMUS_NCCL_ID";

static struct {
#define X(name, parameters, since) ncclResult_t(*name) parameters;
  NCCL_FUNCTIONS(X)
#undef X
} nccl;
static const char *(*error_string)(ncclResult_t);

static int rank, size;
static pid_t other;

static void fine(ncclResult_t got, const char *call, const char *file, int line) {
  if (got == ncclSuccess) return;
  fprintf(stderr, "%s:%d: rank %d: %s returned %u: %s\n", file, line, rank, call, (unsigned)got, error_string(got));
  _exit(1);
}
#define FINE(call) fine(call, #call, __FILE__, __LINE__)

/* ---- the ranks ---- */

static void load(void) {
  const char *chosen = getenv("ENGINE_NCCL_LIBRARY"); /* as for the engine */
  void *found = dlopen(chosen && *chosen && strcmp(chosen, "auto") ? chosen : "libnccl.so.2", RTLD_NOW);
  if (!found) skip("this needs NCCL, which ENGINE_NCCL_LIBRARY names");
#define X(name, parameters, since) nccl.name = (ncclResult_t(*) parameters)(uintptr_t)dlsym(found, #name);
  NCCL_FUNCTIONS(X)
#undef X
  error_string = (const char *(*)(ncclResult_t))(uintptr_t)dlsym(found, "ncclGetErrorString");
  EXPECT(error_string && nccl.ncclGetVersion && nccl.ncclAllReduce);
  if (!nccl.ncclCommInitRankConfig || !nccl.ncclCommFinalize) skip("this needs NCCL 2.14 or newer");
}

/* Of the devices that this process sees, the one of a number: as CUDA_VISIBLE_DEVICES calls it. */
static void choose_device(int number, char *name, size_t space) {
  const char *seen = getenv("CUDA_VISIBLE_DEVICES");
  snprintf(name, space, "%d", number);
  for (; seen && *seen && number; number--) {
    seen = strchr(seen, ',');
    if (!seen++) return;
  }
  if (seen && *seen) snprintf(name, space, "%.*s", (int)strcspn(seen, ","), seen);
}

static void other_has_ended(int signal) {
  int status;
  (void)signal;
  if (waitpid(other, &status, WNOHANG) != other) return;
  other = 0;
  if (status) _exit(1); /* it has said why */
}

static void start_other(const ncclUniqueId *id, int devices, char *name) {
  char text[2 * sizeof *id + 1], device[64];
  char *arguments[] = {"litmus", name, NULL};
  for (size_t k = 0; k < sizeof *id; k++) snprintf(text + 2 * k, 3, "%02x", (unsigned char)id->internal[k]);
  setenv(ID, text, 1);
  if (devices > 1) choose_device(1, device, sizeof device), setenv("CUDA_VISIBLE_DEVICES", device, 1);
  signal(SIGCHLD, other_has_ended);
  EXPECT(posix_spawn(&other, "/proc/self/exe", NULL, NULL, arguments, environ) == 0);
}

static void come_as_other(const char *text, ncclUniqueId *id) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  EXPECT(strlen(text) == 2 * sizeof *id);
  for (size_t k = 0; k < sizeof *id; k++) {
    unsigned byte;
    EXPECT(sscanf(text + 2 * k, "%2x", &byte) == 1);
    id->internal[k] = (char)byte;
  }
}

/* A word of this rank's, of which the sum over all goes to `to`: copied, summed and copied, as a pass packs and unpacks.
 */
typedef struct sum {
  ncclComm_t c;
  CUdeviceptr from, packed, total, to;
  CUstream main, side;
  CUevent fork, join;
} sum;

static sum new_sum(void) {
  return (sum){.from = word(0),
               .packed = word(0),
               .total = word(0),
               .to = word(0),
               .main = non_blocking(),
               .side = non_blocking(),
               .fork = new_event(),
               .join = new_event()};
}

/* A communicator that blocks, of all ranks, which has connected them. */
static ncclComm_t communicator(const char *program, const sum *s) {
  ncclConfig_t config = {.size = sizeof config,
                         .magic = NCCL_API_MAGIC,
                         .version = NCCL_CONFIG_VERSION,
                         .blocking = 1,
                         .cgaClusterSize = NCCL_CONFIG_UNDEF_INT,
                         .minCTAs = NCCL_CONFIG_UNDEF_INT,
                         .maxCTAs = NCCL_CONFIG_UNDEF_INT,
                         .splitShare = NCCL_CONFIG_UNDEF_INT};
  const char *told = getenv(ID);
  int devices, version;
  ncclUniqueId id;
  ncclComm_t made;
  load();
  FINE(nccl.ncclGetVersion(&version));
  OK(cu.cuDeviceGetCount(&devices));
  size = told || devices > 1 || version >= SHARES_DEVICES ? 2 : 1;
  rank = told != NULL;
  if (!told) {
    if (devices < 2) { /* they are read when NCCL first looks */
      setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1);
      setenv("NCCL_NVLS_ENABLE", "0", 1);
      setenv("NCCL_MAX_CTAS", "2", 1);
    }
    FINE(nccl.ncclGetUniqueId(&id));
    if (size > 1) start_other(&id, devices, (char *)(uintptr_t)program);
  } else come_as_other(told, &id);
  FINE(nccl.ncclCommInitRankConfig(&made, size, id, rank, &config));
  FINE(nccl.ncclAllReduce((void *)s->packed, (void *)s->total, 1, ncclUint32, ncclSum, made, s->side));
  OK(cu.cuStreamSynchronize(s->side));
  return made;
}

static void finish(ncclComm_t c) {
  FINE(nccl.ncclCommFinalize(c));
  FINE(nccl.ncclCommDestroy(c));
  while (other) pause(); /* the alarm ends it */
}

/* ---- what is captured ---- */

/* NCCL is on the side stream, between the copies on the main one. */
static void add(const sum *s) {
  copy_word(s->packed, s->from, s->main);
  OK(cu.cuEventRecord(s->fork, s->main));
  OK(cu.cuStreamWaitEvent(s->side, s->fork, 0));
  FINE(nccl.ncclAllReduce((void *)s->packed, (void *)s->total, 1, ncclUint32, ncclSum, s->c, s->side));
  OK(cu.cuEventRecord(s->join, s->side));
  OK(cu.cuStreamWaitEvent(s->main, s->join, 0));
  copy_word(s->to, s->total, s->main);
}

static CUgraphExec captured(const sum *s) {
  CUgraph g;
  CUgraphExec made;
  OK(cu.cuStreamBeginCapture_v2(s->main, CU_STREAM_CAPTURE_MODE_GLOBAL));
  add(s);
  OK(cu.cuStreamEndCapture(s->main, &g));
  OK(cu.cuGraphInstantiateWithFlags(&made, g, 0));
  OK(cu.cuGraphDestroy(g));
  return made;
}

static unsigned own(unsigned step) { return 100 * step + (unsigned)rank + 1; }

static unsigned wanted(unsigned step) { return size == 1 ? 100 * step + 1 : 200 * step + 3; }

static void launch(CUgraphExec g, const sum *s, unsigned step) {
  store(s->from, own(step), s->main);
  OK(cu.cuGraphLaunch(g, s->main));
}

static void look(const sum *s, unsigned step) {
  OK(cu.cuStreamSynchronize(s->main));
  EXPECT(value_of(s->to) == wanted(step));
}

/* ---- the programs ---- */

void sum_is_captured_on_a_side_stream(void) {
  sum s = new_sum();
  CUgraphExec g;
  s.c = communicator(__func__, &s);
  store(s.from, own(1), s.main);
  OK(cu.cuStreamSynchronize(s.main));
  g = captured(&s);
  rest();
  EXPECT(value_of(s.to) == 0); /* it has not run */
  OK(cu.cuGraphLaunch(g, s.main));
  look(&s, 1);
  OK(cu.cuGraphExecDestroy(g));
  finish(s.c);
}

void launches_of_a_sum_take_what_is_there(void) {
  sum s = new_sum();
  CUgraphExec g;
  s.c = communicator(__func__, &s);
  g = captured(&s);
  for (unsigned step = 1; step <= STEPS; step++) {
    launch(g, &s, step);
    look(&s, step);
  }
  for (unsigned step = 1; step <= STEPS; step++) launch(g, &s, step); /* nobody waits between them */
  look(&s, STEPS);
  OK(cu.cuGraphExecDestroy(g));
  finish(s.c);
}

void graphs_of_sums_alternate(void) {
  sum a = new_sum(), b = new_sum();
  CUgraphExec first, second;
  b.main = a.main;
  a.c = b.c = communicator(__func__, &a);
  first = captured(&a);
  second = captured(&b);
  for (unsigned step = 1; step <= STEPS; step++) {
    launch(first, &a, step);
    launch(second, &b, step + 10);
    look(&a, step);
    look(&b, step + 10);
  }
  OK(cu.cuGraphExecDestroy(first)); /* the other one goes on */
  launch(second, &b, 5);
  look(&b, 5);
  OK(cu.cuGraphExecDestroy(second));
  finish(a.c);
}

void sums_go_on_beside_a_graph(void) {
  sum s = new_sum();
  CUgraphExec g;
  s.c = communicator(__func__, &s);
  g = captured(&s);
  for (unsigned step = 1; step <= STEPS; step++) {
    launch(g, &s, 2 * step);
    look(&s, 2 * step);
    store(s.from, own(2 * step + 1), s.main);
    add(&s);
    look(&s, 2 * step + 1);
  }
  OK(cu.cuGraphExecDestroy(g));
  finish(s.c);
}

void graph_goes_before_its_communicator(void) {
  sum s = new_sum();
  CUgraphExec g;
  s.c = communicator(__func__, &s);
  g = captured(&s);
  launch(g, &s, 1);
  OK(cu.cuGraphExecDestroy(g)); /* while it is under way */
  look(&s, 1);
  finish(s.c);
}
