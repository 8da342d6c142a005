// The per-call router: rm_abstract._core.router.
//
// `Facts` knows how to read torch's state without linking torch; a `Route` belongs to one routed
// module, proves call by call that its compiled entry still means what eager would compute, and
// either returns the entry's output or says (NotImplemented) that eager must serve.
#pragma once

#include <pybind11/pybind11.h>

namespace rm::router {

void bind_router(pybind11::module_& module);
// Its parts, each beside what it binds.
void bind_routes(pybind11::module_& router);
void bind_trained_tree(pybind11::module_& router);

}  // namespace rm::router
