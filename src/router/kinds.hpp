// The one table of kinds: how the guard, the key of a call and Python's search for sources
// (rm_abstract/guards) treat a value.
//
// Invariant: a kind that the table does not name is kOther, and nobody may assume that an object of
// kind kOther stays as it is.
#pragma once

#include <Python.h>

#include <cstdint>

namespace rm::router {

enum class ValueKind : std::uint8_t {
  kPlain,   // None, bool, int, float, complex, str, bytes, torch.device: compared by value
  kFixed,   // one object a value for the whole process: dtypes, enum members, classes
  kScalar,  // immutable, a new object each time, compared by identity: NumPy scalars, ranges, dates
  kTuple,   // a tuple or a subclass without further state: compared item by item
  kList,    // exactly list
  kDict,    // exactly dict
  kSet,     // exactly set or frozenset
  kOther,
};

ValueKind kind_of(PyObject* value) noexcept;
const char* name_of(ValueKind kind) noexcept;

/// Whether `now` is what `before` was: plain values by value (floats bit by bit), tuples item by
/// item, everything else by identity.  Either may be null (no value).  Runs no code of the user's.
bool same_value(PyObject* before, PyObject* now, int depth = 0) noexcept;

}  // namespace rm::router
