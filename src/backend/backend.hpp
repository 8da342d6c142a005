// What the core programs against: a device maker's library behind one abstract class.
//
// CApiBackend adapts a plugin (include/rm/backend.h) to it.  All functions may be called from any
// thread; failures are rm::Error.  Handles must not outlive their backend, and a registered backend
// lives until the process ends.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "backend/kernel_rows.hpp"
#include "backend/resources.hpp"
#include "rm/backend.h"
#include "rm/generate.h"
#include "rm/graph.h"

namespace rm::backend {

using Options = std::vector<std::pair<std::string, std::string>>;

/// A compiled program on a device.  Immutable; execute() may run it from several threads when the
/// device has RM_CAP_CONCURRENT_EXECUTE.
class Executable {
 public:
  virtual ~Executable() = default;
  /// Strings live as long as the executable.
  virtual rm_executable_info info() const = 0;
};

struct CompileOptions {
  Options options;
  std::function<void(double fraction, std::string_view stage)> progress;  ///< may be empty
  std::function<bool()> cancelled;                                        ///< may be empty
  std::span<const rm_constant> constants;
};

struct NodeSupport {
  rm_verdict verdict = RM_NODE_NO;
  uint32_t cluster = 0;
  double est_ns = -1;  ///< < 0: unknown
  std::string reason;
};

class Backend {
 public:
  virtual ~Backend() = default;

  virtual const std::string& name() const = 0;
  virtual const std::string& version() const = 0;
  /// Hex digest of the binary: part of every key of an artefact this backend makes.
  virtual const std::string& build_id() const = 0;
  /// The file it came from; empty for a backend that is part of the process.
  virtual const std::string& path() const = 0;

  /// Cheap and without side effects; 0 = cannot run here.
  virtual int probe_score() const = 0;
  /// Probed, initialised and at least one device.  Never throws: the reason goes to *why_not.
  virtual bool is_available(std::string* why_not = nullptr) = 0;

  virtual size_t device_count() = 0;
  /// Looks for devices again, where device_count() remembers what it found. Tells whether they
  /// changed.
  virtual bool refresh_devices() { return false; }
  /// Stable address, lives as long as the backend.
  virtual const rm_device_info& get_device_info(size_t device) = 0;
  /// Everything besides the program that changes an artefact (opaque bytes).
  virtual std::string fingerprint(size_t device) = 0;
  /// Empty for a whole-program backend.
  virtual KernelRows kernels() = 0;
  /// Recordings of launches; null where the backend has none.
  virtual const rm_graphs* graphs() { return nullptr; }
  /// Generation by a runtime of the device's own; null where the backend has none.
  virtual const rm_generators* generators() { return nullptr; }

  virtual std::vector<NodeSupport> query_support(size_t device, const rm_program& program,
                                                 size_t nodes) = 0;
  virtual std::unique_ptr<Executable> prepare_model(size_t device, const rm_program& program,
                                                    const CompileOptions& options) = 0;
  virtual std::string serialize(const Executable& executable) = 0;
  virtual rm_compat check_compat(size_t device, std::string_view artefact) = 0;
  virtual std::unique_ptr<Executable> deserialize(size_t device, std::string_view artefact,
                                                  std::span<const rm_constant> constants) = 0;
  virtual void execute(const Executable& executable, const rm_execute_args& args) = 0;

  virtual Buffer allocate(size_t device, uint32_t kind, size_t bytes, size_t alignment) = 0;
  virtual void copy(rm_stream* stream, const rm_tensor& src, rm_tensor& dst) = 0;
  virtual Stream create_stream(size_t device, uint32_t flags) = 0;
  virtual Stream wrap_stream(size_t device, void* native) = 0;
  virtual Event create_event(size_t device) = 0;
};

}  // namespace rm::backend

namespace rm {
using Backend = backend::Backend;
}
