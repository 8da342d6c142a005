// Reads cpuid through the compiler's builtins, which also check that the OS saves the registers.
#include "isa.hpp"

#include <algorithm>
#include <atomic>
#include <stdexcept>

#if RM_CPU_X86
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#endif

namespace rm::cpu {
namespace {

/// Extras as bits, in the order of their names.
enum ExtraBit : int { kBf16 = 1, kAmx = 2, kVnni = 4, kAvxVnni = 8, kAllExtras = 15 };
constexpr struct {
  const char* name;
  int bit;
  Isa level;
} kExtraNames[] = {{"bf16", kBf16, Isa::avx512},
                   {"amx", kAmx, Isa::avx512},
                   {"vnni", kVnni, Isa::avx512},
                   {"avxvnni", kAvxVnni, Isa::avx2}};

// The cap: level in the low byte, allowed extras above it.
std::atomic<int> cap{static_cast<int>(Isa::avx512) | kAllExtras << 8};

Isa cap_level() { return static_cast<Isa>(cap.load(std::memory_order_relaxed) & 0xff); }
int cap_extras() { return cap.load(std::memory_order_relaxed) >> 8; }

#if RM_CPU_X86
bool cpuid_bit(unsigned leaf, unsigned sub, int reg, int bit) {
  unsigned r[4] = {0, 0, 0, 0};
  if (!__get_cpuid_count(leaf, sub, &r[0], &r[1], &r[2], &r[3])) return false;
  return (r[reg] >> bit) & 1u;
}

// Linux hands out the AMX tile registers only to processes that ask (arch_prctl(2)).
bool request_amx() {
#if defined(__linux__) && defined(SYS_arch_prctl)
  constexpr int kReqXcompPerm = 0x1023, kXfeatureXtiledata = 18;
  return syscall(SYS_arch_prctl, kReqXcompPerm, kXfeatureXtiledata) == 0;
#else
  return false;
#endif
}
#endif

}  // namespace

Isa detected_isa() {
#if RM_CPU_X86
  static const Isa isa = [] {
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                      __builtin_cpu_supports("bmi2") && cpuid_bit(1, 0, 2, 29 /* f16c */);
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512vl");
    return avx512 ? Isa::avx512 : avx2 ? Isa::avx2 : Isa::baseline;
  }();
  return isa;
#else
  return Isa::baseline;
#endif
}

namespace {

/// Extras of the machine as bits, whatever the cap.
int detected_extras() {
#if RM_CPU_X86
  static const int bits = [] {
    int found = 0;
    if (detected_isa() == Isa::avx512) {
      found |= cpuid_bit(7, 1, 0, 5) ? kBf16 : 0;
      found |= cpuid_bit(7, 0, 3, 24) && cpuid_bit(7, 0, 3, 22) && request_amx() ? kAmx : 0;
      found |= cpuid_bit(7, 0, 2, 11) ? kVnni : 0;
    }
    if (detected_isa() >= Isa::avx2) found |= cpuid_bit(7, 1, 0, 4) ? kAvxVnni : 0;
    return found;
  }();
  return bits;
#else
  return 0;
#endif
}

bool has_amx_int8() {
#if RM_CPU_X86
  static const bool found = cpuid_bit(7, 0, 3, 25);
  return found;
#else
  return false;
#endif
}

std::string set_name(Isa level, int extra_bits) {
  std::string out = isa_name(level);
  for (const auto& extra : kExtraNames) {
    if ((extra_bits & extra.bit) != 0 && extra.level <= level) out += std::string("+") + extra.name;
  }
  return out;
}

[[noreturn]] void reject(std::string_view name) {
  throw std::invalid_argument(
      "[cpu_isa] expected auto, or baseline, avx2 or avx512 with any of this machine's " +
      set_name(detected_isa(), detected_extras()) + " behind it, got " + std::string(name));
}

int extra_bit(std::string_view name, Isa level) {
  for (const auto& extra : kExtraNames) {
    if (name == extra.name && extra.level <= level) return extra.bit;
  }
  return 0;
}

}  // namespace

void set_isa_cap(std::string_view name) {
  if (name.empty() || name == "auto") {
    cap.store(static_cast<int>(Isa::avx512) | kAllExtras << 8);
    return;
  }
  std::string_view rest = name;
  const auto next = [&rest] {
    const size_t end = std::min(rest.find('+'), rest.size());
    const std::string_view word = rest.substr(0, end);
    rest.remove_prefix(std::min(end + 1, rest.size()));
    return word;
  };
  const std::string_view level_name = next();
  Isa level = Isa::baseline;
  while (level < Isa::avx512 && level_name != isa_name(level)) {
    level = static_cast<Isa>(static_cast<int>(level) + 1);
  }
  if (level_name != isa_name(level) || level > detected_isa()) reject(name);
  int wanted = 0;
  while (!rest.empty()) {
    const int bit = extra_bit(next(), level);
    if ((bit & detected_extras()) == 0) reject(name);
    wanted |= bit;
  }
  cap.store(static_cast<int>(level) | wanted << 8);
}

Isa selected_isa() { return std::min(cap_level(), detected_isa()); }

Extras extras() {
  const int bits = detected_extras() & cap_extras();
  const bool wide = selected_isa() == Isa::avx512;
  Extras e;
  e.avx512_bf16 = wide && (bits & kBf16) != 0;
  e.amx_bf16 = wide && (bits & kAmx) != 0;
  e.amx_int8 = e.amx_bf16 && has_amx_int8();
  e.avx512_vnni = wide && (bits & kVnni) != 0;
  e.avx_vnni = supported(Isa::avx2) && (bits & kAvxVnni) != 0;
  return e;
}

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::baseline:
      return "baseline";
    case Isa::avx2:
      return "avx2";
    case Isa::avx512:
      return "avx512";
  }
  return "baseline";
}

std::string isa_fingerprint() {
  return set_name(selected_isa(), detected_extras() & cap_extras());
}

}  // namespace rm::cpu
