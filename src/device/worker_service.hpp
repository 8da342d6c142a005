// A backend as what its worker does: the plugin's own compile, serialize, deserialize and execute,
// on tensors in shared memory.
#pragma once

#include "backend/backend.hpp"
#include "worker/server.hpp"

namespace rm::device {

class BackendService final : public worker::Service {
 public:
  explicit BackendService(Backend& backend) : backend_(backend) {}
  worker::Ready describe() override;
  worker::Bytes compile(const worker::CompileJob& job) override;
  std::unique_ptr<worker::Runnable> load(const worker::LoadJob& job) override;
  std::unique_ptr<worker::States> make_states(uint64_t device, const worker::Slots& slots) override;
  void copy_states(const worker::CopyJob& job) override;

 private:
  Backend& backend_;
};

inline constexpr const char* kCompiling = "RM301";
inline constexpr const char* kExecuting = "RM307";  ///< loading, running, keeping states

/// What a plugin's code means in this situation: "RM304" for an operator it does not have, ...
/// `otherwise`, one of the above or another reason, for one that says no more.
std::string reason_of(rm_code code, const std::string& otherwise);

}  // namespace rm::device
