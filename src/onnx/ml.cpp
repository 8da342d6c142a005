// Operators of ai.onnx.ml that prepare features; its models of trees and vectors are refused.
#include "onnx/importer.hpp"

namespace rm::onnx {
namespace {

void convert_binarizer(Importer& m) {
  ValueId x = m.in(0);
  m.out(m.cast(m.op("gt", {x, m.number(x, m.f("threshold", 0))}), m.dtype(x)));
}

// Columns of the last axis by their numbers; of a vector, as a row.
void convert_feature_extractor(Importer& m) {
  ValueId x = m.in(0), y = m.in(1);
  Dims d = m.dims(x);
  if (d.empty()) m.refuse("rows of features", "a scalar");
  if (d.size() == 1) x = m.reshape(x, {Dim(1), d[0]});
  y = m.reshape(y, {ir::product(m.dims(y))});
  m.out(m.take(x, static_cast<int64_t>(m.rank(x)) - 1, y));
}

}  // namespace

void add_ml(Table* table) {
  Table& t = *table;
  t["ai.onnx.ml.Binarizer"] = convert_binarizer;
  t["ai.onnx.ml.ArrayFeatureExtractor"] = convert_feature_extractor;
}

}  // namespace rm::onnx
