// What autograd, autocast and FakeTensor ask of CUDA, answered as by two devices that are never busy.
//
// A torch without CUDA has nothing registered here and refuses to differentiate tensors on a CUDA
// device, even those without memory. Loaded before torch, this stub lets it go on.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

constexpr c10::DeviceIndex kCount = 2;
thread_local c10::DeviceIndex current = 0;

c10::DeviceIndex exchange(c10::DeviceIndex device) {
  const c10::DeviceIndex before = current;
  current = device < 0 ? current : device;
  return before;
}

c10::Device card(c10::DeviceIndex index) { return c10::Device(c10::DeviceType::CUDA, index); }

c10::Stream stream(c10::Device device) {
  return c10::Stream(c10::Stream::DEFAULT, device.has_index() ? device : card(current));
}

struct CardGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::DeviceIndex deviceCount() const noexcept override { return kCount; }

  c10::Device exchangeDevice(c10::Device to) const override { return card(exchange(to.index())); }
  c10::Device getDevice() const override { return card(current); }
  void setDevice(c10::Device to) const override { exchange(to.index()); }
  void uncheckedSetDevice(c10::Device to) const noexcept override { exchange(to.index()); }

  c10::Stream getStream(c10::Device device) const override { return stream(device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(device); }
  c10::Stream exchangeStream(c10::Stream to) const override { return stream(to.device()); }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}

  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void*) const override {}
  void destroyEvent(void*, c10::DeviceIndex) const noexcept override {}
};

// torch looks it up by this name.
struct CUDAHooks final : at::CUDAHooksInterface {
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(at::DeviceIndex) const override { return true; }
  at::DeviceIndex deviceCount() const override { return kCount; }
  int getNumGPUs() const override { return kCount; }
  at::DeviceIndex current_device() const override { return current; }
  at::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(at::DeviceIndex to) const override { exchange(to); }
  at::DeviceIndex exchangeDevice(at::DeviceIndex to) const override { return exchange(to); }
  at::DeviceIndex maybeExchangeDevice(at::DeviceIndex to) const override { return exchange(to); }
};

const c10::impl::DeviceGuardImplRegistrar registered(c10::DeviceType::CUDA, new CardGuard());

}  // namespace

namespace at {
namespace {
REGISTER_CUDA_HOOKS(CUDAHooks)
}
}  // namespace at
