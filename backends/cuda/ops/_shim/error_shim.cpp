// Checks that every operator shares, and the CUDA runtime's errors in words: no device, a lost
// context, or a call that failed by itself.
#include "_shim/dispatch_shim.hpp"

namespace rm::cuda_ops {
namespace {

bool no_device(cudaError_t e) {
  return e == cudaErrorNoDevice || e == cudaErrorInsufficientDriver ||
         e == cudaErrorSystemDriverMismatch || e == cudaErrorStubLibrary;
}

/// Errors after which every call of the process fails: a kernel made one, some time before.
bool ends_context(cudaError_t e) {
  switch (e) {
    case cudaErrorIllegalAddress:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorIllegalInstruction:
    case cudaErrorHardwareStackError:
    case cudaErrorLaunchFailure:
    case cudaErrorLaunchTimeout:
    case cudaErrorAssert:
    case cudaErrorECCUncorrectable:
      return true;
    default:
      return false;
  }
}

}  // namespace

Status cuda_status(const char* op, cudaError_t e, const char* what) {
  if (e == cudaSuccess) return {};
  if (ends_context(e)) {
    return {Code::device_error,
            text_of({"[", op, "] expected a working CUDA context, got ", cudaGetErrorName(e), ": ",
                     cudaGetErrorString(e),
                     "; a kernel that ran before this call failed and no CUDA call of this process "
                     "can succeed any more; try a new process under compute-sanitizer"})};
  }
  const bool none = no_device(e);
  return {none ? Code::no_device : Code::device_error,
          text_of({"[", op, "] expected ", none ? "a CUDA device" : what, ", got ",
                   cudaGetErrorName(e), ": ", cudaGetErrorString(e),
                   none ? "; try a machine with an NVIDIA driver" : "; try compute-sanitizer"})};
}

Status check_workspace(const char* op, std::size_t needed, const Workspace& w, const char* how) {
  if (w.bytes < needed) {
    return invalid(text_of({"[", op, "] expected a workspace of ", std::to_string(needed),
                            " bytes, got ", std::to_string(w.bytes), "; try ", how}));
  }
  const auto off = reinterpret_cast<std::uintptr_t>(w.data) % kWorkspaceAlignment;
  if (w.bytes == 0 || off == 0) return {};
  return invalid(text_of({"[", op, "] expected a workspace whose address is a multiple of ",
                          std::to_string(kWorkspaceAlignment), ", got one ", std::to_string(off),
                          " bytes behind such an address; try a buffer of its own"}));
}

Status earlier_error(const char* op) {
  const cudaError_t e = cudaPeekAtLastError();
  if (e == cudaSuccess) return {};
  if (ends_context(e)) return cuda_status(op, e, "");
  cudaGetLastError();
  return {};
}

}  // namespace rm::cuda_ops
