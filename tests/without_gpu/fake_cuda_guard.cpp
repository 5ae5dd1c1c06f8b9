// Lets torch run forward and backward passes on fake CUDA tensors without a GPU: autograd and the factory functions ask
// for hooks and a guard of the device, which a CPU build lacks and a CUDA build passes on to the driver. These know eight
// devices with a stream each.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace at {
struct CUDAHooks : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return false; }
};
// Before the hooks of a CUDA build, which would be an error at the same priority.
C10_REGISTER_TYPED_CLASS_WITH_PRIORITY(CUDAHooksRegistry, "CUDAHooks", c10::REGISTRY_PREFERRED, CUDAHooks);
}  // namespace at

constexpr c10::DeviceType CUDA = c10::DeviceType::CUDA;

thread_local c10::DeviceIndex current = 0;

struct Guard final : c10::impl::NoOpDeviceGuardImpl<CUDA> {
  static c10::Stream only_stream(c10::Device device) { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Device getDevice() const override { return {CUDA, current}; }
  void setDevice(c10::Device device) const override { current = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current = device.index(); }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return 8; }
  c10::Stream getStream(c10::Device device) const noexcept override { return only_stream(device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return only_stream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return stream; }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
};

// The latest guard of a device counts: to be called once torch has registered its own.
extern "C" void register_guard() { c10::impl::DeviceGuardImplRegistrar(CUDA, new Guard); }
