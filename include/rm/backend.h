/* backend.h -- the only contract between the rm_abstract core and a backend.
 *
 * Rules.  (1) C11, no C++ types, no exceptions across this line.  (2) Every
 * struct starts with `struct_size`, set by its *writer*; readers use
 * RM_HAS_FIELD.  (3) Fields are appended, never moved or removed, until
 * RM_ABI_MAJOR changes.  (4) rm_status* is NULL on success; the host allocates
 * and frees every status.  (5) Handles are opaque, owned by the backend, and
 * destroy(NULL) is a no-op.  (6) Strings are UTF-8 (data,size), never NUL-relied.
 */
#ifndef RM_BACKEND_H
#define RM_BACKEND_H

#include <stddef.h>
#include <stdint.h>

#include <dlpack/dlpack.h> /* DLTensor has no struct tag: it cannot be forward-declared */

#ifdef __cplusplus
extern "C" {
#endif

#define RM_ABI_MAJOR 1u
#define RM_ABI_MINOR 2u
#define RM_ABI_VERSION ((RM_ABI_MAJOR << 16) | RM_ABI_MINOR)

/* True if `p` was written by a side that knows `field`. */
#define RM_HAS_FIELD(type, p, field) \
  ((p)->struct_size >= offsetof(type, field) + sizeof((p)->field))

#if defined(__cplusplus)
#define RM_STATIC_ASSERT(c, m) static_assert(c, m)
#else
#define RM_STATIC_ASSERT(c, m) _Static_assert(c, m)
#endif
/* Frozen sizes: growing a struct must be a reviewed edit of this line. */
#define RM_FREEZE(type, bytes) \
  RM_STATIC_ASSERT(sizeof(type) == (bytes), #type ": layout changed, bump RM_ABI_MINOR")

/* ---- values ----------------------------------------------------------- */
typedef struct { const char* data; size_t size; } rm_str;           /* borrowed */
typedef struct { const void* data; size_t size; } rm_bytes;         /* borrowed */
typedef struct rm_blob {                                            /* owned    */
  const void* data; size_t size; void* ctx;
  void (*release)(struct rm_blob* self);
} rm_blob;
typedef struct { rm_str key; rm_str value; } rm_option;              /* never grows */
typedef struct { const rm_option* data; size_t size; } rm_options;

typedef enum {            /* = absl/gRPC canonical codes */
  RM_OK = 0, RM_CANCELLED = 1, RM_UNKNOWN = 2, RM_INVALID_ARGUMENT = 3,
  RM_DEADLINE_EXCEEDED = 4, RM_NOT_FOUND = 5, RM_ALREADY_EXISTS = 6,
  RM_PERMISSION_DENIED = 7, RM_RESOURCE_EXHAUSTED = 8,
  RM_FAILED_PRECONDITION = 9, RM_ABORTED = 10, RM_OUT_OF_RANGE = 11,
  RM_UNIMPLEMENTED = 12, RM_INTERNAL = 13, RM_UNAVAILABLE = 14, RM_DATA_LOSS = 15
} rm_code;

typedef struct rm_status rm_status;           /* host-owned, NULL == OK */
typedef struct rm_device rm_device;           /* all below: backend-owned */
typedef struct rm_stream rm_stream;
typedef struct rm_event rm_event;
typedef struct rm_buffer rm_buffer;
typedef struct rm_executable rm_executable;
typedef DLTensor rm_tensor;                   /* always a borrowed view */

/* ---- what the host gives the backend ---------------------------------- */
typedef struct rm_host_api {
  size_t struct_size; uint32_t abi_version; uint32_t reserved;
  rm_status* (*status_create)(rm_code code, rm_str message, const char* file, int line);
  void (*status_release)(rm_status* status);
  rm_code (*status_code)(const rm_status* status);
  rm_str (*status_message)(const rm_status* status);   /* lifetime of status */
  void (*log)(int severity, rm_str message);
  /* Since 1.1. Optional services of the host by name, e.g. "rm.host_executor/1"; NULL when it has
   * none of that name. */
  const void* (*extension)(rm_str name);
} rm_host_api;

/* ---- capability ------------------------------------------------------- */
enum {                                     /* rm_device_info.caps */
  RM_CAP_ASYNC = 1u << 0,                  /* execute() only enqueues             */
  RM_CAP_CONCURRENT_EXECUTE = 1u << 1,     /* one executable, many streams        */
  RM_CAP_SERIALIZE = 1u << 2,              /* serialize()/deserialize() work      */
  RM_CAP_GRAPH_CAPTURE = 1u << 3,
  RM_CAP_TRAINING = 1u << 4,
  RM_CAP_HOST_POINTERS = 1u << 5           /* reads host memory without a copy    */
};
typedef struct rm_device_info {
  size_t struct_size; uint64_t caps;
  int32_t dl_device_type, dl_device_id;    /* DLPack identity */
  uint64_t memory_bytes; uint32_t alignment, reserved;
  rm_str name, arch;                       /* "NVIDIA H100", "sm_90a" */
  rm_options properties;                   /* open key/value, lifetime of device */
} rm_device_info;

typedef enum { RM_NODE_NO = 0, RM_NODE_YES = 1, RM_NODE_PREFERRED = 2 } rm_verdict;
/* One per node, in program order.  The host allocates the array, fills `struct_size` and steps by
 * it, so a newer plugin cannot overrun an older host's rows. */
typedef struct rm_node_support {
  size_t struct_size; rm_verdict verdict;
  uint32_t cluster;                        /* nodes the backend wants compiled together */
  double est_ns;                           /* < 0: unknown */
  rm_str reason;                           /* why not; lifetime of the device */
} rm_node_support;

/* ---- programs and artefacts ------------------------------------------- */
typedef struct rm_program {                /* canonical bytes: also what the cache hashes */
  size_t struct_size; rm_str format;       /* "rm.ir/1", "onnx", "torch.export" */
  rm_bytes code;
} rm_program;
/* A constant of the program: mapped, never copied into `code`. `digest` is its content (32 bytes)
 * or empty when the host has not hashed it; `tensor.data` may be NULL for compile-only runs. */
typedef struct rm_constant {
  size_t struct_size; rm_str name; rm_bytes digest; const rm_tensor* tensor;
} rm_constant;
typedef struct rm_constants { const rm_constant* data; size_t size, stride; } rm_constants;
typedef struct rm_compile_options {
  size_t struct_size; rm_options options;
  /* fraction in [0, 1] or < 0 when unknown; `stage` such as "lowering" is borrowed for the call. */
  void (*progress)(void* ctx, double fraction, rm_str stage); void* progress_ctx;
  int (*cancelled)(void* ctx); void* cancelled_ctx;   /* non-zero: stop soon with RM_CANCELLED */
  rm_constants constants;
} rm_compile_options;
typedef enum {
  RM_COMPAT_NO = 0, RM_COMPAT_RECOMPILE_BETTER = 1, RM_COMPAT_OPTIMAL = 2
} rm_compat;
typedef struct rm_executable_info {
  size_t struct_size; size_t num_inputs, num_outputs;
  uint64_t workspace_bytes, device_bytes;
  rm_str stats_json;                       /* lifetime of the executable */
} rm_executable_info;
/* Device state that outlives a call (KV cache): one per donated input (docs/plugin_guide.md). */
typedef struct rm_state_handle { rm_str name; rm_buffer* buffer; } rm_state_handle;
typedef struct rm_execute_args {
  size_t struct_size; rm_stream* stream;   /* NULL only without RM_CAP_ASYNC */
  const rm_tensor* const* inputs; size_t num_inputs;
  rm_tensor* const* outputs; size_t num_outputs;    /* caller-allocated */
  rm_buffer* workspace;                    /* >= executable_info.workspace_bytes */
  const rm_state_handle* states; size_t num_states;
} rm_execute_args;

/* ---- what the backend gives the host ---------------------------------- */
typedef struct rm_backend_api {
  size_t struct_size; uint32_t abi_version; uint32_t reserved;
  rm_str name, version, build_id;          /* build_id: digest of this .so */

  /* Cheap and side-effect free: no driver is loaded, no device touched. 0 = cannot run here. */
  int (*probe_score)(void);
  rm_status* (*initialize)(rm_options options);        /* once, before anything below */
  void (*shutdown)(void);                              /* the .so itself is never unloaded */

  rm_status* (*device_count)(size_t* out);
  rm_status* (*device_open)(size_t index, rm_device** out);
  void (*device_close)(rm_device*);
  rm_status* (*device_info)(rm_device*, rm_device_info* out);  /* out->struct_size = caller's size */
  /* Everything besides the program that changes the artefact: compiler, driver,
   * library and kernel-set versions.  Goes into the cache key. */
  rm_status* (*fingerprint)(rm_device*, rm_blob* out);

  rm_status* (*query_support)(rm_device*, const rm_program*, rm_node_support* out, size_t n);
                                                       /* rows step by out->struct_size */
  rm_status* (*compile)(rm_device*, const rm_program*, const rm_compile_options*, rm_executable** out);
  rm_status* (*serialize)(const rm_executable*, rm_blob* out);
  rm_status* (*check_compat)(rm_device*, rm_bytes artefact, rm_compat* out);
  rm_status* (*deserialize)(rm_device*, rm_bytes artefact, rm_constants constants, rm_executable** out);
  rm_status* (*executable_info)(const rm_executable*, rm_executable_info* out);
  void (*executable_destroy)(rm_executable*);
  rm_status* (*execute)(const rm_executable*, const rm_execute_args*);

  rm_status* (*buffer_alloc)(rm_device*, uint32_t kind, size_t bytes, size_t align, rm_buffer** out);
  void (*buffer_free)(rm_buffer*);
  rm_status* (*buffer_ptr)(rm_buffer*, void** out);
  rm_status* (*copy)(rm_stream*, const rm_tensor* src, rm_tensor* dst);

  rm_status* (*stream_create)(rm_device*, uint32_t flags, rm_stream** out);
  rm_status* (*stream_wrap)(rm_device*, void* native, rm_stream** out);   /* e.g. cudaStream_t */
  rm_status* (*stream_sync)(rm_stream*);
  void (*stream_destroy)(rm_stream*);
  rm_status* (*event_create)(rm_device*, rm_event** out);
  rm_status* (*event_record)(rm_event*, rm_stream*);
  rm_status* (*event_wait)(rm_event*, rm_stream*);     /* device-side wait */
  rm_status* (*event_query)(rm_event*, int* ready);
  rm_status* (*event_sync)(rm_event*);                 /* returns the async error */
  void (*event_destroy)(rm_event*);

  /* Optional surface by name, e.g. "rm.kernels/1" (registry), "rm.graph/1" (capture). */
  const void* (*extension)(rm_str name);
} rm_backend_api;

/* The one exported symbol.  Returns NULL if this backend cannot speak the host's major. */
typedef const rm_backend_api* (*rm_backend_query_fn)(uint32_t host_abi, const rm_host_api* host);
#define RM_BACKEND_QUERY_SYMBOL "rm_backend_query"

#if UINTPTR_MAX == UINT64_MAX
RM_FREEZE(rm_blob, 32);
RM_FREEZE(rm_host_api, 64);
RM_FREEZE(rm_device_info, 88);
RM_FREEZE(rm_node_support, 40);
RM_FREEZE(rm_program, 40);
RM_FREEZE(rm_constant, 48);
RM_FREEZE(rm_compile_options, 80);
RM_FREEZE(rm_execute_args, 72);
RM_FREEZE(rm_executable_info, 56);
RM_FREEZE(rm_backend_api, 312);
#endif

#ifdef __cplusplus
}
#endif
#endif /* RM_BACKEND_H */
