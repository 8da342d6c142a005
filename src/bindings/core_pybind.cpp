// The module rm_abstract._core.
#include "bindings/bind.hpp"
#include "engine/host_executor.hpp"
#include "router/router.hpp"

PYBIND11_MODULE(_core, m) {
  using namespace rm::bindings;
  m.doc() = "The C++ core of rm_abstract.";
  bind_errors(m);
  bind_options(m);
  bind_cache(m);
  bind_backend(m);
  bind_control(m);
  bind_ir(m);
  bind_selfcheck(m);
  bind_autograd(m);
  bind_eager(m);
  bind_generate(m);
  bind_onnx(m);
  bind_program(m);
  rm::router::bind_router(m);
  bind_training(m);
  bind_worker(m);
  rm::engine::offer_host_executor();
}
