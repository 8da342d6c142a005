/* host_executor.h -- host extension "rm.host_executor/1": programs run by the core's own compiler on
 * the CPU.  For simulated devices, for the parts of a program a device leaves to the host, and as a
 * reference.  Programs must have static shapes; tensors are contiguous host memory.
 */
#ifndef RM_HOST_EXECUTOR_H
#define RM_HOST_EXECUTOR_H
#include "rm/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

#define RM_HOST_EXECUTOR_EXTENSION "rm.host_executor/1"

typedef struct rm_host_program rm_host_program;   /* host-owned */
typedef struct rm_host_executor {
  size_t struct_size;
  /* The constants' memory must stay as it is until destroy. `options` are compile options by name
   * (docs/options.md); "optimization_level" 0 rounds after every operator as the program says. */
  rm_status* (*prepare)(const rm_program*, rm_constants, rm_options options, rm_host_program** out);
  /* Any number of threads. */
  rm_status* (*run)(const rm_host_program*, const rm_tensor* const* inputs, size_t num_inputs,
                    rm_tensor* const* outputs, size_t num_outputs);
  void (*destroy)(rm_host_program*);               /* NULL is a no-op */
} rm_host_executor;

#if UINTPTR_MAX == UINT64_MAX
RM_FREEZE(rm_host_executor, 32);
#endif

#ifdef __cplusplus
}
#endif
#endif /* RM_HOST_EXECUTOR_H */
