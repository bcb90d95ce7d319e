/* Stream capture: what is put into a capturing stream becomes a node of a graph, and what a thread may not call
 * meanwhile. */
#include "internal.h"

static capture *captures;
static __thread unsigned thread_mode; /* CU_STREAM_CAPTURE_MODE_GLOBAL */

/* What a capture has made: a graph has it, and so has each executable one that was made of it. */
typedef struct nodes {
  int references, n;
  stand_operation *all;
} nodes;

typedef struct graph {
  nodes *nodes;
} graph;

static nodes *nodes_of(const capture *c) {
  nodes *made = malloc(sizeof *made);
  *made = (nodes){1, c->n_nodes, c->nodes};
  return made;
}

static graph *graph_of(nodes *its) {
  graph *g = malloc(sizeof *g);
  *g = (graph){its};
  return g;
}

/* Launches that are under way read the operations still, so these stay for good. */
static void nodes_drop(nodes *its) {
  if (--its->references) return;
  for (int i = 0; i < its->n; i++)
    if (its->all[i].released) its->all[i].released(its->all[i].data);
  free(its);
}

void capture_invalidate(capture *c) { c->invalid = 1; }

CUresult capture_forbids(void) {
  CUresult result = CUDA_SUCCESS;
  if (MUTANT(unsafe_calls_allowed) || (thread_mode == CU_STREAM_CAPTURE_MODE_RELAXED && !MUTANT(relaxed_is_refused)))
    return result;
  for (capture *c = captures; c; c = c->next) {
    int own = pthread_equal(c->thread, pthread_self());
    int others = c->mode == CU_STREAM_CAPTURE_MODE_GLOBAL &&
                 (thread_mode != CU_STREAM_CAPTURE_MODE_THREAD_LOCAL || MUTANT(thread_local_is_global));
    if (c->invalid || !(own ? c->mode != CU_STREAM_CAPTURE_MODE_RELAXED : others)) continue;
    capture_invalidate(c);
    result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  }
  return result;
}

int legacy_is_captured(const context *c) {
  for (stream *s = streams; s; s = s->next)
    if (s->capture && s->context == c && !(s->flags & CU_STREAM_NON_BLOCKING)) return 1;
  return 0;
}

CUresult capture_put(stream *s, const stand_operation *what) {
  capture *c = s->capture;
  if (c->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  if (MUTANT(capture_executes)) {
    s->capture = NULL;
    stream_put(s, what, NULL, NULL);
    s->capture = c;
    return CUDA_SUCCESS;
  }
  c->nodes = realloc(c->nodes, sizeof *c->nodes * (size_t)(c->n_nodes + 1));
  c->nodes[c->n_nodes] = *what;
  c->nodes[c->n_nodes].what = strdup(what->what);
  if (what->n_accesses) {
    stand_access *own = malloc(sizeof *own * (size_t)what->n_accesses);
    memcpy(own, what->accesses, sizeof *own * (size_t)what->n_accesses);
    c->nodes[c->n_nodes].accesses = own;
  }
  c->n_nodes++;
  s->knows[s->agent->number] = ++c->counts[s->agent->number];
  return CUDA_SUCCESS;
}

static void join(int **into, const int *from) {
  if (!*into) *into = calloc(AGENTS, sizeof **into);
  for (int i = 0; from && i < AGENTS; i++)
    if (from[i] > (*into)[i]) (*into)[i] = from[i];
}

CUresult capture_record(event *e, stream *s) {
  if (s->capture->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  free(e->knows);
  e->knows = NULL;
  join(&e->knows, s->knows);
  operation_drop(e->at);
  e->at = NULL;
  e->capture = s->capture;
  e->where = s;
  return CUDA_SUCCESS;
}

static CUresult spoil(stream *s, event *e, CUresult why) {
  if (s->capture) capture_invalidate(s->capture);
  if (e->capture) capture_invalidate(e->capture);
  return why;
}

CUresult capture_wait(stream *s, event *e) {
  capture *c = s->capture ? s->capture : e->capture;
  if (c->invalid) return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  if (!e->capture) return spoil(s, e, CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
  if (s == s->context->legacy) return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
  if (s->capture && s->capture != e->capture) return spoil(s, e, CUDA_ERROR_STREAM_CAPTURE_MERGE);
  s->capture = c; /* it joins, if it was not in it */
  join(&s->knows, e->knows);
  return CUDA_SUCCESS;
}

STAND_API CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
  unsigned before = thread_mode;
  ENTER(0);
  if (*mode > CU_STREAM_CAPTURE_MODE_RELAXED) LEAVE(CUDA_ERROR_INVALID_VALUE);
  thread_mode = *mode;
  *mode = before;
  LEAVE(CUDA_SUCCESS);
}

STAND_API CUresult cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus *status) {
  CUresult wrong;
  stream *s;
  ENTER(0);
  s = stream_of(handle, &wrong);
  if (s)
    *status = !s->capture           ? CU_STREAM_CAPTURE_STATUS_NONE
              : s->capture->invalid ? CU_STREAM_CAPTURE_STATUS_INVALIDATED
                                    : CU_STREAM_CAPTURE_STATUS_ACTIVE;
  LEAVE(wrong);
}

STAND_API CUresult cuStreamBeginCapture_v2(CUstream handle, CUstreamCaptureMode mode) {
  CUresult wrong;
  capture *c;
  stream *s;
  ENTER(0);
  s = stream_of(handle, &wrong);
  if (!s) LEAVE(wrong);
  if (mode > CU_STREAM_CAPTURE_MODE_RELAXED) LEAVE(CUDA_ERROR_INVALID_VALUE);
  if (s->capture || s == s->context->legacy) LEAVE(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  c = calloc(1, sizeof *c);
  *c = (capture){.next = captures, .origin = s, .thread = pthread_self(), .mode = mode};
  captures = c;
  s->capture = c;
  join(&s->knows, NULL);
  LEAVE(CUDA_SUCCESS);
}

STAND_API CUresult cuStreamEndCapture(CUstream handle, CUgraph *made) {
  CUresult wrong;
  capture *c, **each = &captures;
  stream *s;
  nodes *its;
  ENTER(0);
  s = stream_of(handle, &wrong);
  *made = NULL;
  if (!s) LEAVE(wrong);
  c = s->capture;
  if (!c || c->origin != s) LEAVE(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
  if (c->mode != CU_STREAM_CAPTURE_MODE_RELAXED && !pthread_equal(c->thread, pthread_self()))
    LEAVE(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
  if (c->invalid) wrong = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
  for (stream *t = streams; t; t = t->next)
    if (t->capture == c) {
      if (!wrong && s->knows[t->agent->number] < c->counts[t->agent->number] && !MUTANT(unjoined_allowed))
        wrong = CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
    }
  for (stream *t = streams; t; t = t->next)
    if (t->capture == c) {
      t->capture = NULL;
      free(t->knows);
      t->knows = NULL;
    }
  events_forget(c);
  while (*each != c) each = &(*each)->next;
  *each = c->next;
  its = nodes_of(c);
  if (wrong) nodes_drop(its);
  else *made = (CUgraph)graph_of(its);
  free(c);
  LEAVE(wrong);
}

/* ---- graphs: their nodes run one after the other, in the order in which they were captured ---- */

STAND_API CUresult cuGraphInstantiateWithFlags(CUgraphExec *made, CUgraph which, unsigned long long flags) {
  graph *g;
  ENTER(NEEDS_CONTEXT);
  if (!which || flags) LEAVE(CUDA_ERROR_INVALID_VALUE);
  g = graph_of(((graph *)which)->nodes);
  g->nodes->references++;
  *made = (CUgraphExec)g;
  LEAVE(CUDA_SUCCESS);
}

STAND_API CUresult cuGraphLaunch(CUgraphExec which, CUstream handle) {
  graph *g = (graph *)which;
  CUresult wrong;
  stream *s;
  ENTER(NEEDS_CONTEXT);
  s = stream_of(handle, &wrong);
  if (!s) LEAVE(wrong);
  if (s->capture) LEAVE(CUDA_ERROR_NOT_SUPPORTED);
  for (int i = 0, n = g->nodes->n; i < n && !wrong; i++) {
    stand_operation node = g->nodes->all[MUTANT(capture_forgets_order) ? n - 1 - i : i];
    if (node.again) node.data = node.again(node.data);
    else node.drop = NULL;
    wrong = stream_put(s, &node, NULL, NULL);
  }
  LEAVE(wrong);
}

static void destroy(graph *g) {
  nodes_drop(g->nodes);
  free(g);
}

STAND_API CUresult cuGraphDestroy(CUgraph which) {
  ENTER(0);
  destroy((graph *)which);
  LEAVE(CUDA_SUCCESS);
}

STAND_API CUresult cuGraphExecDestroy(CUgraphExec which) {
  ENTER(0);
  destroy((graph *)which);
  LEAVE(CUDA_SUCCESS);
}
