// What autograd, autocast and FakeTensor ask of CUDA, answered as by one device that is never busy.
//
// A torch without CUDA has nothing registered here and refuses to differentiate tensors on a CUDA
// device, even those without memory. Loaded before torch, this stub lets it go on.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

const c10::Device kCard(c10::DeviceType::CUDA, 0);
const c10::Stream kStream(c10::Stream::DEFAULT, kCard);

struct CardGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Device exchangeDevice(c10::Device) const override { return kCard; }
  c10::Device getDevice() const override { return kCard; }
  void setDevice(c10::Device) const override {}
  void uncheckedSetDevice(c10::Device) const noexcept override {}

  c10::Stream getStream(c10::Device) const override { return kStream; }
  c10::Stream getDefaultStream(c10::Device) const override { return kStream; }
  c10::Stream exchangeStream(c10::Stream) const override { return kStream; }
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
  at::DeviceIndex deviceCount() const override { return 1; }
  int getNumGPUs() const override { return 1; }
  at::DeviceIndex current_device() const override { return 0; }
  at::DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(at::DeviceIndex) const override {}
  at::DeviceIndex exchangeDevice(at::DeviceIndex) const override { return 0; }
  at::DeviceIndex maybeExchangeDevice(at::DeviceIndex) const override { return 0; }
};

const c10::impl::DeviceGuardImplRegistrar registered(c10::DeviceType::CUDA, new CardGuard());

}  // namespace

namespace at {
namespace {
REGISTER_CUDA_HOOKS(CUDAHooks)
}
}  // namespace at
