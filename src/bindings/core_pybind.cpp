// The module rm_abstract._core.
#include "bindings/bind.hpp"
#include "bindings/host_executor.hpp"

PYBIND11_MODULE(_core, m) {
  using namespace rm::bindings;
  m.doc() = "The C++ core of rm_abstract.";
  bind_errors(m);
  bind_options(m);
  bind_cache(m);
  bind_backend(m);
  bind_control(m);
  bind_ir(m);
  bind_program(m);
  bind_router(m);
  bind_worker(m);
  offer_host_executor();
}
