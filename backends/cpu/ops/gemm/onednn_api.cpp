// Finds oneDNN once; the library stays loaded for the life of the process.
#include "ops/gemm/onednn_api.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <stdexcept>

#include "common/options.hpp"

namespace rm::cpu::gemm::onednn {
namespace {

void* open_library() {
  const std::string path = plugin_option("onednn_path");
  if (!path.empty()) {
    if (void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) return library;
  }
  return dlopen("libdnnl.so.3", RTLD_NOW | RTLD_LOCAL);
}

Api load() {
  Api a;
  void* library = open_library();
  if (!library) {
    a.why_not =
        "oneDNN is not installed (pip install onednn-cpu-gomp) and option onednn_path names none";
    return a;
  }
  const auto find = [&](const char* name, auto& target) {
    target = reinterpret_cast<std::remove_reference_t<decltype(target)>>(dlsym(library, name));
    if (!target) a.why_not = std::string("the oneDNN found lacks ") + name;
  };
#define RM_ONEDNN_FIND(name, parameters) find("dnnl_" #name, a.name);
  RM_ONEDNN_FUNCTIONS(RM_ONEDNN_FIND)
#undef RM_ONEDNN_FIND
  find("dnnl_memory_desc_get_size", a.memory_desc_get_size);
  find("dnnl_primitive_desc_query_md", a.primitive_desc_query_md);
  find("dnnl_version", a.version);
  if (!a.why_not.empty()) return a;
  const Version* v = a.version();
  a.version_text =
      std::to_string(v->major) + "." + std::to_string(v->minor) + "." + std::to_string(v->patch);
  if (v->major != 3) {
    a.why_not = "expected oneDNN 3, got " + a.version_text;
  } else if (a.engine_create(&a.engine, kEngineCpu, 0) != 0) {
    a.why_not = "oneDNN could not create a CPU engine";
  }
  return a;
}

}  // namespace

std::string layout_text(Handle md, int rank) {
  int64_t padded[kMaxDims] = {}, strides[kMaxDims] = {}, blocks[kMaxDims] = {}, axes[kMaxDims] = {};
  int count = 0;
  bool known = api().memory_desc_query(md, kQueryInnerCount, &count) == 0;
  // The queries hand out pointers into the description.
  const auto list = [&](int what, int64_t* out, int n) {
    const int64_t* values = nullptr;
    if (api().memory_desc_query(md, what, &values) != 0) {
      known = false;
    } else {
      std::copy(values, values + n, out);
    }
  };
  list(kQueryPaddedDims, padded, rank), list(kQueryStrides, strides, rank);
  list(kQueryInnerBlocks, blocks, count), list(kQueryInnerAxes, axes, count);
  if (!known) {
    throw std::runtime_error("[onednn] expected a layout that can be described, got an error");
  }
  std::string text;
  for (int i = 0; i < rank; ++i) {
    text += '-' + std::to_string(padded[i]) + ':' + std::to_string(strides[i]);
  }
  for (int i = 0; i < count; ++i) {
    text += '-' + std::to_string(blocks[i]) + static_cast<char>('a' + axes[i]);
  }
  return text;
}

const Api& api() {
  static const Api loaded = load();
  return loaded;
}

}  // namespace rm::cpu::gemm::onednn
