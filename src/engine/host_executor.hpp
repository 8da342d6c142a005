// The host extension "rm.host_executor/1" (include/rm/host_executor.h).
#pragma once

namespace rm::engine {

/// Offers it to the plugins that are loaded from now on.
void offer_host_executor();

}  // namespace rm::engine
