/* Small programs about what the driver promises. The same binary runs against a driver and against its stand-in.
 *
 * A *gate* is a function of the host in a stream: what is behind it waits until the program opens it. A driver may call
 * such functions one after the other, so a program closes a second gate only behind or after a first.
 */
#ifndef LITMUS_H
#define LITMUS_H

#include "engine_ext/gpu/cuda.h"

#include <pthread.h>
#include <stdio.h>

/* The driver's functions, found when the program starts. */
typedef struct driver {
#define X(name, parameters) CUresult(*name) parameters;
  CUDA_FUNCTIONS(X)
#undef X
} driver;
extern driver cu;
extern void *library;
void *optional(const char *name); /* a function that only the stand-in has, or NULL */

typedef struct gate {
  pthread_mutex_t lock;
  pthread_cond_t moved;
  int entered, open;
} gate;

typedef struct program {
  const char *name;
  void (*run)(void);
} program;

/* Ends the program: what was expected, and where. */
#define EXPECT(condition) expect((condition) != 0, #condition, __FILE__, __LINE__)
#define OK(call) returns(call, CUDA_SUCCESS, #call, __FILE__, __LINE__)
#define RETURNS(call, code) returns(call, code, #call, __FILE__, __LINE__)
void expect(int condition, const char *text, const char *file, int line);
void returns(CUresult got, CUresult wanted, const char *text, const char *file, int line);
void skip(const char *why);

void rest(void); /* lets the device run whatever it can */
CUstream blocking(void);
CUstream non_blocking(void);
CUevent new_event(void);
CUdeviceptr word(unsigned value);  /* new device memory with a number in it; nothing is pending */
unsigned value_of(CUdeviceptr at); /* looked at by a stream of its own, now */
void store(CUdeviceptr at, unsigned value, CUstream s);
void copy_word(CUdeviceptr to, CUdeviceptr from, CUstream s);
CUfunction store_kernel(void); /* (address, value) */
gate *shut(CUstream s);        /* a closed gate at the end of a stream; returns when the device is at it */
gate *shut_behind(CUstream s); /* one that the device comes to later */
void open_gate(gate *g);
int happened(CUevent e); /* whether all comes to pass that an event covers */
int passed(CUstream s);  /* whether a stream gets through all that is in it */
void on_thread(void (*function)(void *), void *argument);

/* What is behind a closed gate does not happen; what is not, does. */
#define BLOCKED(s) EXPECT((rest(), !passed_now(s)))
#define PASSES(s) EXPECT(passed(s))
#define HAPPENS(e) EXPECT(happened(e))
int passed_now(CUstream s);

extern CUcontext first_context;
CUcontext second_context(void); /* of another device; skips without */

extern const program programs[];

#endif
