// Finds the GNU build-id note of the shared object that holds this function.
#include "common/build_id.hpp"

#include <elf.h>
#include <link.h>

#include <cstring>

namespace rm::cuda {
namespace {

struct Search {
  uintptr_t inside;
  std::string hex;
};

std::string note_hex(const char* note, size_t size) {
  const char* end = note + size;
  while (note + sizeof(ElfW(Nhdr)) <= end) {
    ElfW(Nhdr) header;
    std::memcpy(&header, note, sizeof(header));
    const char* name = note + sizeof(header);
    const char* desc = name + ((header.n_namesz + 3u) & ~3u);
    if (header.n_type == NT_GNU_BUILD_ID && header.n_namesz == 4 && !std::memcmp(name, "GNU", 4)) {
      static const char digits[] = "0123456789abcdef";
      std::string hex;
      for (uint32_t i = 0; i < header.n_descsz; ++i) {
        const auto byte = static_cast<unsigned char>(desc[i]);
        hex += digits[byte >> 4];
        hex += digits[byte & 15];
      }
      return hex;
    }
    note = desc + ((header.n_descsz + 3u) & ~3u);
  }
  return {};
}

int visit(dl_phdr_info* info, size_t, void* ctx) {
  auto* search = static_cast<Search*>(ctx);
  bool ours = false;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& p = info->dlpi_phdr[i];
    const uintptr_t begin = info->dlpi_addr + p.p_vaddr;
    ours |= p.p_type == PT_LOAD && search->inside >= begin && search->inside < begin + p.p_memsz;
  }
  if (!ours) return 0;
  for (int i = 0; i < info->dlpi_phnum && search->hex.empty(); ++i) {
    const auto& p = info->dlpi_phdr[i];
    if (p.p_type == PT_NOTE) {
      search->hex = note_hex(reinterpret_cast<const char*>(info->dlpi_addr + p.p_vaddr), p.p_memsz);
    }
  }
  return 1;
}

}  // namespace

const std::string& build_id() {
  static const std::string id = [] {
    Search search{reinterpret_cast<uintptr_t>(&build_id), {}};
    dl_iterate_phdr(visit, &search);
    return search.hex;
  }();
  return id;
}

}  // namespace rm::cuda
