// Finds oneDNN once; the library stays loaded for the life of the process.
#include "onednn/api.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <stdexcept>

#include "common/options.hpp"

namespace rm::cpu::onednn {
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
#define RM_ONEDNN_FIND(name) find("dnnl_" #name, a.name);
  RM_ONEDNN_FUNCTIONS(RM_ONEDNN_FIND)
#undef RM_ONEDNN_FIND
  if (!a.why_not.empty()) return a;
  const dnnl_version_t* v = a.version();
  a.version_text =
      std::to_string(v->major) + "." + std::to_string(v->minor) + "." + std::to_string(v->patch);
  if (v->major != DNNL_VERSION_MAJOR) {
    a.why_not = "expected oneDNN " + std::to_string(DNNL_VERSION_MAJOR) + ", got " + a.version_text;
  } else if (a.engine_create(&a.engine, dnnl_cpu, 0) != dnnl_success) {
    a.why_not = "oneDNN could not create a CPU engine";
  }
  return a;
}

}  // namespace

std::string layout_text(const_dnnl_memory_desc_t description, int rank) {
  dnnl_dims_t padded{}, strides{}, blocks{}, axes{};
  int count = 0;
  const auto query = [&](dnnl_query_t what, void* result) {
    if (api().memory_desc_query(description, what, result) != dnnl_success) {
      throw std::runtime_error("[onednn] expected a layout that can be described, got an error");
    }
  };
  query(dnnl_query_inner_nblks_s32, &count);
  // These queries hand out pointers into the description.
  const auto list = [&](dnnl_query_t what, dnnl_dim_t* out, int n) {
    const dnnl_dims_t* values = nullptr;
    query(what, &values);
    std::copy(*values, *values + n, out);
  };
  list(dnnl_query_padded_dims, padded, rank), list(dnnl_query_strides, strides, rank);
  list(dnnl_query_inner_blks, blocks, count), list(dnnl_query_inner_idxs, axes, count);
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

}  // namespace rm::cpu::onednn
