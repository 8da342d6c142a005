/* graph.h -- extension "rm.graph/1": launches recorded once and given to the device as one.
 *
 * Only rows with RM_KERNEL_CAPTURABLE are recorded, on memory that stays as long as the graph.
 */
#ifndef RM_GRAPH_H
#define RM_GRAPH_H
#include "rm/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

#define RM_GRAPH_EXTENSION "rm.graph/1"

typedef struct rm_graph rm_graph;        /* backend-owned */
typedef struct rm_graphs {
  size_t struct_size;
  /* From here on what this thread launches on the stream is recorded and does not run. The stream is
   * one that the backend made. */
  rm_status* (*begin)(rm_stream*);
  /* Ends the recording, also one in which a launch failed. */
  rm_status* (*end)(rm_stream*, rm_graph** out);
  rm_status* (*launch)(rm_graph*, rm_stream*);
  void (*destroy)(rm_graph*);            /* NULL is a no-op; may come before launches have ended */
} rm_graphs;

#if UINTPTR_MAX == UINT64_MAX
RM_FREEZE(rm_graphs, 40);
#endif

#ifdef __cplusplus
}
#endif
#endif /* RM_GRAPH_H */
