// The kernels of src/moet/kernels/cuda/device as a shared library for ctypes.
#include "kernels.cu"

extern "C" int moet_host_launch(const char* name, const void* params, u32 grid_x, u32 grid_y,
                                u32 threads, u32 shared_bytes, u32 lazy, u32 reverse) {
  const auto run = [&](auto kernel, auto type) {
    using Params = decltype(type);
    const Params p = *static_cast<const Params*>(params);
    host::launch([=] { kernel(p); }, {grid_x, grid_y}, threads, shared_bytes, lazy, reverse);
    return 0;
  };
  if (!std::strcmp(name, "moet_quantise")) return run(moet_quantise, QuantiseParams{});
  if (!std::strcmp(name, "moet_gate_up_8")) return run(moet_gate_up_8, StageParams{});
  if (!std::strcmp(name, "moet_gate_up_16")) return run(moet_gate_up_16, StageParams{});
  if (!std::strcmp(name, "moet_down_8")) return run(moet_down_8, StageParams{});
  if (!std::strcmp(name, "moet_down_16")) return run(moet_down_16, StageParams{});
  if (!std::strcmp(name, "moet_combine")) return run(moet_combine, CombineParams{});
  if (!std::strcmp(name, "moet_post")) return run(moet_post, PostParams{});
  if (!std::strcmp(name, "moet_wait")) return run(moet_wait, WaitParams{});
  return 1;
}

extern "C" u32 moet_host_size(const char* name) {
  if (!std::strcmp(name, "QuantiseParams")) return sizeof(QuantiseParams);
  if (!std::strcmp(name, "StageParams")) return sizeof(StageParams);
  if (!std::strcmp(name, "CombineParams")) return sizeof(CombineParams);
  if (!std::strcmp(name, "PostParams")) return sizeof(PostParams);
  if (!std::strcmp(name, "WaitParams")) return sizeof(WaitParams);
  if (!std::strcmp(name, "MailState")) return sizeof(MailState);
  return 0;
}
