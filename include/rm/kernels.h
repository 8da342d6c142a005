/* kernels.h -- extension "rm.kernels/1": the kernel rows a backend offers to the core's planner.
 *
 * A row is chosen for a *problem* (operator, shapes, strides, dtypes, attributes), prepared once
 * into an immutable state, and launched any number of times with nothing but data pointers.
 * Array order is the default priority.  Every operator that a backend of the host lists ends with
 * a row that has RM_KERNEL_FALLBACK; a device with memory of its own may leave problems without a
 * row, and models with such a problem run in PyTorch.  docs/operators.md gives the operands and attributes of each operator.
 */
#ifndef RM_KERNELS_H
#define RM_KERNELS_H
#include "rm/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

#define RM_KERNELS_EXTENSION "rm.kernels/1"

enum {                                   /* rm_kernel.traits */
  RM_KERNEL_FALLBACK = 1u << 0,          /* supports() is true for every problem of the schema */
  RM_KERNEL_DETERMINISTIC = 1u << 1,     /* same bits for same inputs, any thread count */
  RM_KERNEL_CAPTURABLE = 1u << 2,        /* may run while a device graph is being captured */
  RM_KERNEL_BRIDGE = 1u << 3             /* runs another framework: not counted as native */
};

typedef enum {
  RM_ATTR_INT = 0, RM_ATTR_FLOAT = 1, RM_ATTR_STRING = 2, RM_ATTR_INTS = 3, RM_ATTR_FLOATS = 4
} rm_attr_kind;
typedef struct rm_attr {                 /* all borrowed */
  size_t struct_size;
  rm_str name;
  rm_attr_kind kind; uint32_t reserved;
  int64_t i; double f; rm_str s;         /* INT, FLOAT, STRING */
  const int64_t* ints; const double* floats; size_t count;  /* INTS, FLOATS */
} rm_attr;

/* Everything selection may look at.  An absent optional operand is a NULL entry.  `data` is always
 * NULL, also for a constant (bit i of constant_inputs): equal problems share a state, so values come
 * in prepack and launch only.  Strides are in elements, never NULL; broadcast operands come with
 * stride 0, so elementwise operands all have the shape of the result. */
typedef struct rm_problem {
  size_t struct_size;
  rm_str op;
  const rm_tensor* const* inputs; size_t num_inputs;
  const rm_tensor* const* outputs; size_t num_outputs;
  const rm_attr* attrs; size_t num_attrs, attr_stride;
  uint64_t constant_inputs;              /* bit i: operand i never changes (a weight) */
} rm_problem;

typedef struct rm_kernel_state rm_kernel_state;   /* backend-owned, immutable, any thread */

/* How a kernel wants a constant operand stored.  Two states of one backend that return the same
 * `layout` for the same tensor share one packed copy, so the layout must not depend on the other operands' sizes
 * unless it has to. */
typedef struct rm_packing {
  size_t struct_size;
  uint64_t bytes; uint32_t alignment, reserved;
  rm_str layout;                         /* lifetime of the state */
} rm_packing;

typedef struct rm_launch {
  size_t struct_size;
  const rm_kernel_state* state;
  const void* const* inputs;             /* first element of each operand, NULL when absent; the
                                            packed copy where prepack was used */
  void* const* outputs;
  void* workspace;                       /* workspace() bytes, 64-byte aligned */
  rm_stream* stream;
} rm_launch;

/* A size along an axis at which a kernel takes another path: rows or columns of its tiles, the
 * length of a vector, of a block or of a piece of a loop. `axis` is the letter docs/operators.md
 * gives the axis ('M', 'N', 'K', ...), 0 for the innermost axis of operators without letters. */
typedef struct rm_edge { uint32_t axis; uint32_t reserved; int64_t size; } rm_edge; /* never grows */

typedef struct rm_kernel {
  size_t struct_size;
  rm_str op;                             /* "gemm"; "aten.*" matches every aten operator */
  rm_str name;                           /* unique among the operator's rows */
  rm_str digest;                         /* of the sources or the binary: part of the cache key */
  uint32_t traits, num_configs;          /* num_configs >= 1 */
  /* Cheap and pure. 0 = no, and *why_not is text that stays valid until the thread's next call. */
  int (*supports)(const rm_problem*, const rm_device_info*, rm_str* why_not);
  double (*cost_ns)(const rm_problem*, const rm_device_info*, uint32_t config);
  /* The problem is borrowed. May be slow; a row that packs needs no interpreter's lock (fork). */
  rm_status* (*prepare)(const rm_problem*, const rm_device_info*, uint32_t config,
                        rm_kernel_state** out);
  void (*release)(rm_kernel_state*);                         /* NULL is a no-op */
  uint64_t (*workspace)(const rm_kernel_state*);             /* may be NULL: 0 bytes */
  /* May be NULL: no operand is packed. bytes = 0 in *out: this operand is used as it lies. */
  void (*packing)(const rm_kernel_state*, size_t input, rm_packing* out);
  rm_status* (*prepack)(const rm_kernel_state*, size_t input, const rm_tensor* src, void* dst);
  rm_status* (*launch)(const rm_launch*);                    /* allocates nothing on success */
  /* Since 1.2. May be NULL. Tests draw the sizes of operands around the edges; the self-check
   * takes two sizes for alike only where they have the same position between the edges. */
  const rm_edge* edges; size_t num_edges;
} rm_kernel;

typedef struct rm_kernels {
  size_t struct_size;
  const rm_kernel* rows; size_t count, row_stride;
} rm_kernels;

#if UINTPTR_MAX == UINT64_MAX
RM_FREEZE(rm_attr, 88);
RM_FREEZE(rm_problem, 88);
RM_FREEZE(rm_packing, 40);
RM_FREEZE(rm_launch, 48);
RM_FREEZE(rm_kernel, 144);
RM_FREEZE(rm_edge, 16);
RM_FREEZE(rm_kernels, 32);
#endif

#ifdef __cplusplus
}
#endif
#endif /* RM_KERNELS_H */
