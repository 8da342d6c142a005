// Instruction sets the kernels are built for, and the one chosen for this process.
//
// Only sources listed as ISA_SOURCES get -m flags; everything else is plain x86-64 (or AArch64).
// Invariant: code of level L runs only after supported(L) said yes.
#pragma once

#include <string>
#include <string_view>

#if defined(__x86_64__)
#define RM_CPU_X86 1
#else
#define RM_CPU_X86 0
#endif

namespace rm::cpu {

/// Ordered: each level includes the ones below.
enum class Isa { baseline = 0, avx2 = 1, avx512 = 2 };

/// Extras a kernel may ask for on top of a level (avx_vnni: avx2, all others: avx512); false where
/// the machine lacks them or the cap of set_isa_cap leaves them out.
struct Extras {
  bool avx512_bf16 = false;
  bool amx_bf16 = false;
  bool amx_int8 = false;  // "amx" as well, where the processor has both
  bool avx512_vnni = false;
  bool avx_vnni = false;
};

/// What the machine and the operating system can run (cpuid and XCR0), before any cap.
Isa detected_isa();

/// Lowers what is used from now on: exactly the set named, as isa_fingerprint() writes it
/// ("baseline", "avx2", "avx512", "avx512+vnni"); "" or "auto" is all that was detected.
/// Throws std::invalid_argument for other names and for sets the machine lacks.
void set_isa_cap(std::string_view name);

/// min(detected, cap): the best level kernels may use.
Isa selected_isa();
inline bool supported(Isa isa) { return isa <= selected_isa(); }

Extras extras();

const char* isa_name(Isa isa);

/// Level and extras in one word, for the fingerprint: "avx512+bf16+amx+vnni".
std::string isa_fingerprint();

}  // namespace rm::cpu
