// Where everything lies in an expert's record (docs/format.md): the C++ side of
// moet.formats.tiling.ExpertLayout, compared with it in the tests. Offsets and sizes in bytes.
#pragma once
#include <cstddef>

#include "../cpu/kernels.h"

namespace moet {

struct RecordLayout {
  int hidden, intermediate;  // multiples of 32
  bool biased;

  int hidden_blocks() const { return hidden / kBlock; }
  int intermediate_blocks() const { return intermediate / kBlock; }
  int pairs() const { return intermediate / kTileRows; }   // of a gate and an up strip
  int downs() const { return hidden / kTileRows; }         // down strips
  size_t pair_bytes() const { return 2 * strip_bytes(hidden_blocks()); }
  size_t down_bytes() const { return strip_bytes(intermediate_blocks()); }

  size_t gate(int i) const { return i * pair_bytes(); }
  size_t up(int i) const { return gate(i) + pair_bytes() / 2; }
  size_t down(int i) const { return gate(pairs()) + i * down_bytes(); }
  size_t gate_bias() const { return down(downs()); }
  size_t up_bias() const { return gate_bias() + sizeof(float) * intermediate; }
  size_t down_bias() const { return up_bias() + sizeof(float) * intermediate; }

  size_t payload() const { return biased ? down_bias() + sizeof(float) * hidden : gate_bias(); }
  size_t record() const { return (payload() + 4095) / 4096 * 4096; }
};

}  // namespace moet
