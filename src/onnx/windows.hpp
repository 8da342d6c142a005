// What several converters share: windows that slide, products, convolutions.
#pragma once

#include "onnx/importer.hpp"

namespace rm::onnx {

/// stride, dilation and padding of the node; `auto_pad` needs the sizes of x, `[N,C,*]`.
ir::Attrs windows(const Importer& m, const Dims& x, const Ints& kernel, bool auto_pad);
/// Where the largest element of each window of x lies in x, which MaxPool gives as its second
/// result; `attrs` as of `windows`.
ValueId largest_places(Importer& m, ValueId x, const Ints& kernel, const ir::Attrs& attrs);
/// Of vectors, matrices or stacks of them.
ValueId product(Importer& m, ValueId a, ValueId b);
/// With the attributes of the node; `bias` may be kNoValue.
ValueId convolution(Importer& m, ValueId x, ValueId w, ValueId bias);

}  // namespace rm::onnx
