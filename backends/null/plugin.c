/* The smallest legal plugin, in C: one device "null" that wraps any program and computes nothing,
 * so it supports no operator.
 * It is the template of a whole-program backend and the known-good plugin of the ABI tests; it is
 * never chosen by `auto` (probe score 1, no device name of its own).
 */
#include <stdlib.h>
#include <string.h>

#include "rm/backend.h"

#define STR(text) ((rm_str){(text), sizeof(text) - 1})
#define EXPORT __attribute__((visibility("default")))

struct rm_device { int index; };
struct rm_buffer { void* data; };
struct rm_executable { rm_blob code; };   /* a private copy of the program's bytes */

static const rm_host_api* host;
static struct rm_device the_device = {0};

static rm_status* fail(rm_code code, rm_str message, int line) {
  return host->status_create(code, message, "backends/null/plugin.c", line);
}

/* ---- device ----------------------------------------------------------- */
static int probe_score(void) { return 1; }
static rm_status* initialize(rm_options options) { (void)options; return NULL; }
static void shutdown_backend(void) {}
static rm_status* device_count(size_t* out) { *out = 1; return NULL; }

static rm_status* device_open(size_t index, rm_device** out) {
  if (index != 0) return fail(RM_OUT_OF_RANGE, STR("expected device 0"), __LINE__);
  *out = &the_device;
  return NULL;
}
static void device_close(rm_device* device) { (void)device; }

static rm_status* device_info(rm_device* device, rm_device_info* out) {
  (void)device;
  rm_device_info info;
  memset(&info, 0, sizeof info);
  info.struct_size = out->struct_size < sizeof info ? out->struct_size : sizeof info;
  info.caps = RM_CAP_CONCURRENT_EXECUTE | RM_CAP_SERIALIZE | RM_CAP_HOST_POINTERS;
  info.dl_device_type = kDLCPU;
  info.alignment = 1;
  info.name = STR("null");
  info.arch = STR("none");
  memcpy(out, &info, info.struct_size);   /* never past what the host allocated */
  return NULL;
}

static void release_nothing(rm_blob* blob) { (void)blob; }
static rm_status* fingerprint(rm_device* device, rm_blob* out) {
  (void)device;
  *out = (rm_blob){"null/1", 6, NULL, release_nothing};
  return NULL;
}

/* ---- programs --------------------------------------------------------- */
static rm_status* query_support(rm_device* device, const rm_program* program, rm_node_support* out,
                                size_t n) {
  (void)device; (void)program;
  char* row = (char*)out;
  const size_t stride = n > 0 ? out->struct_size : 0;
  for (size_t i = 0; i < n; ++i, row += stride) {
    /* It wraps programs and computes nothing: what it ran would be wrong. */
    ((rm_node_support*)row)->verdict = RM_NODE_NO;
    ((rm_node_support*)row)->reason = STR("this backend computes nothing");
  }
  return NULL;
}

static void release_copy(rm_blob* blob) { free(blob->ctx); blob->ctx = NULL; }
static int copy_bytes(rm_bytes bytes, rm_blob* out) {
  void* memory = malloc(bytes.size > 0 ? bytes.size : 1);
  if (memory == NULL) return 0;
  if (bytes.size > 0) memcpy(memory, bytes.data, bytes.size);
  *out = (rm_blob){memory, bytes.size, memory, release_copy};
  return 1;
}

static rm_status* make_executable(rm_bytes code, rm_executable** out) {
  rm_executable* executable = malloc(sizeof *executable);
  if (executable == NULL || !copy_bytes(code, &executable->code)) {
    free(executable);
    return fail(RM_RESOURCE_EXHAUSTED, STR("out of memory"), __LINE__);
  }
  *out = executable;
  return NULL;
}

static rm_status* compile(rm_device* device, const rm_program* program,
                          const rm_compile_options* options, rm_executable** out) {
  (void)device;
  if (options != NULL && options->cancelled != NULL && options->cancelled(options->cancelled_ctx)) {
    return fail(RM_CANCELLED, STR("cancelled by the caller"), __LINE__);
  }
  rm_status* status = make_executable(program->code, out);
  if (status == NULL && options != NULL && options->progress != NULL) {
    options->progress(options->progress_ctx, 1.0, STR("done"));
  }
  return status;
}

static rm_status* serialize(const rm_executable* executable, rm_blob* out) {
  const rm_bytes code = {executable->code.data, executable->code.size};
  return copy_bytes(code, out) ? NULL : fail(RM_RESOURCE_EXHAUSTED, STR("out of memory"), __LINE__);
}
static rm_status* check_compat(rm_device* device, rm_bytes artefact, rm_compat* out) {
  (void)device; (void)artefact;
  *out = RM_COMPAT_OPTIMAL;
  return NULL;
}
static rm_status* deserialize(rm_device* device, rm_bytes artefact, rm_constants constants,
                              rm_executable** out) {
  (void)device; (void)constants;
  return make_executable(artefact, out);
}
static rm_status* executable_info(const rm_executable* executable, rm_executable_info* out) {
  rm_executable_info info;
  memset(&info, 0, sizeof info);
  info.struct_size = out->struct_size < sizeof info ? out->struct_size : sizeof info;
  info.device_bytes = executable->code.size;
  info.stats_json = STR("{}");
  memcpy(out, &info, info.struct_size);
  return NULL;
}
static void executable_destroy(rm_executable* executable) {
  if (executable == NULL) return;
  executable->code.release(&executable->code);
  free(executable);
}
static rm_status* execute(const rm_executable* executable, const rm_execute_args* args) {
  (void)executable; (void)args;   /* outputs keep what they held */
  return NULL;
}

/* ---- memory ----------------------------------------------------------- */
static rm_status* buffer_alloc(rm_device* device, uint32_t kind, size_t bytes, size_t align,
                               rm_buffer** out) {
  (void)device; (void)kind;
  if ((align & (align - 1)) != 0) {   /* 0: no wish */
    return fail(RM_INVALID_ARGUMENT, STR("expected an alignment that is a power of two"), __LINE__);
  }
  if (align < sizeof(void*)) align = sizeof(void*);
  rm_buffer* buffer = malloc(sizeof *buffer);
  if (buffer == NULL || posix_memalign(&buffer->data, align, bytes > 0 ? bytes : 1) != 0) {
    free(buffer);
    return fail(RM_RESOURCE_EXHAUSTED, STR("out of memory"), __LINE__);
  }
  *out = buffer;
  return NULL;
}
static void buffer_free(rm_buffer* buffer) {
  if (buffer == NULL) return;
  free(buffer->data);
  free(buffer);
}
static rm_status* buffer_ptr(rm_buffer* buffer, void** out) { *out = buffer->data; return NULL; }

/* The device is synchronous: no streams, no events, no extension. */
static const rm_backend_api api = {
    .struct_size = sizeof(rm_backend_api), .abi_version = RM_ABI_VERSION,
    .name = {"null", 4}, .version = {"1", 1}, .build_id = {"", 0},
    .probe_score = probe_score, .initialize = initialize, .shutdown = shutdown_backend,
    .device_count = device_count, .device_open = device_open, .device_close = device_close,
    .device_info = device_info, .fingerprint = fingerprint, .query_support = query_support,
    .compile = compile, .serialize = serialize, .check_compat = check_compat,
    .deserialize = deserialize, .executable_info = executable_info,
    .executable_destroy = executable_destroy, .execute = execute,
    .buffer_alloc = buffer_alloc, .buffer_free = buffer_free, .buffer_ptr = buffer_ptr,
};

EXPORT const rm_backend_api* rm_backend_query(uint32_t host_abi, const rm_host_api* host_api);
const rm_backend_api* rm_backend_query(uint32_t host_abi, const rm_host_api* host_api) {
  if ((host_abi >> 16) != RM_ABI_MAJOR) return NULL;
  host = host_api;
  return &api;
}
