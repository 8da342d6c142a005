// Reads cpuid through the compiler's builtins, which also check that the OS saves the registers.
#include "isa.hpp"

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

std::atomic<int> cap{static_cast<int>(Isa::avx512)};

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

void set_isa_cap(std::string_view name) {
  Isa wanted = detected_isa();
  if (name == "baseline") {
    wanted = Isa::baseline;
  } else if (name == "avx2") {
    wanted = Isa::avx2;
  } else if (name == "avx512") {
    wanted = Isa::avx512;
  } else if (!name.empty() && name != "auto") {
    throw std::invalid_argument("[cpu_isa] expected auto, baseline, avx2 or avx512, got " +
                                std::string(name));
  }
  if (wanted > detected_isa()) {
    throw std::invalid_argument("[cpu_isa] expected at most " +
                                std::string(isa_name(detected_isa())) + " on this machine, got " +
                                std::string(name) + "; try auto");
  }
  cap.store(static_cast<int>(wanted));
}

Isa selected_isa() {
  const int c = cap.load(std::memory_order_relaxed), d = static_cast<int>(detected_isa());
  return static_cast<Isa>(c < d ? c : d);
}

Extras extras() {
  Extras e;
#if RM_CPU_X86
  if (selected_isa() == Isa::avx512) {
    static const bool bf16 = cpuid_bit(7, 1, 0, 5);
    static const bool amx = cpuid_bit(7, 0, 3, 24) && cpuid_bit(7, 0, 3, 22) && request_amx();
    static const bool vnni = cpuid_bit(7, 0, 2, 11);
    e.avx512_bf16 = bf16;
    e.amx_bf16 = amx;
    e.avx512_vnni = vnni;
  }
  static const bool avx_vnni = cpuid_bit(7, 1, 0, 4);
  e.avx_vnni = supported(Isa::avx2) && avx_vnni;
#endif
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
  const Extras e = extras();
  return std::string(isa_name(selected_isa())) + (e.avx512_bf16 ? "+bf16" : "") +
         (e.amx_bf16 ? "+amx" : "") + (e.avx512_vnni ? "+vnni" : "") +
         (e.avx_vnni ? "+avxvnni" : "");
}

}  // namespace rm::cpu
