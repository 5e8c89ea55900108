// An asynchronous device whose memory is the host's, as torch's backend PrivateUse1.
//
// Each stream is a thread that takes its work in order, after a random pause. Operators run torch's own kernels for the
// CPU on that thread. An operator that returns a new tensor waits for its stream; every other one returns at once.
// Streams come from 32 for each device in turn, as under CUDA. Memory that is freed belongs at once to whoever allocates
// next on the stream that it was allocated on, and is overwritten in the order of that stream.

#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <array>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <thread>

namespace {

constexpr int kDevices = 2, kPool = 32;
constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr unsigned char kFresh = 0xA5, kFreed = 0xDD;

std::atomic<int> visible{0}, longest_pause{0};
std::atomic<uint64_t> seed{0}, faults{0};

class Queue {
 public:
  Queue(int device, int64_t id) : device(device), id(id) {}

  uint64_t give(std::function<void()> work) {
    std::lock_guard hold(lock_);
    if (!started_) {
      started_ = true;
      std::thread([this] { serve(); }).detach();
    }
    work_.push_back(std::move(work));
    changed_.notify_all();
    return ++given_;
  }

  uint64_t given() {
    std::lock_guard hold(lock_);
    return given_;
  }

  bool has_done(uint64_t count) {
    std::lock_guard hold(lock_);
    return done_ >= count;
  }

  void wait_done(uint64_t count) {
    std::unique_lock hold(lock_);
    changed_.wait(hold, [&] { return done_ >= count; });
  }

  const int device;
  const int64_t id;

 private:
  void serve() {
    for (;;) {
      std::function<void()> work;
      {
        std::unique_lock hold(lock_);
        changed_.wait(hold, [&] { return !work_.empty(); });
        work = std::move(work_.front());
        work_.pop_front();
      }
      pause();
      try {
        work();
      } catch (const std::exception&) {  // such as an index that lies in no tensor
        ++faults;
      }
      std::lock_guard hold(lock_);
      ++done_;
      changed_.notify_all();
    }
  }

  // Every other piece of work is late; on some streams all of it, and by more.
  void pause() {
    const int longest = longest_pause;
    if (seed != seeded_ || longest == 0) {
      seeded_ = seed;
      random_.seed(seeded_ * 1000003 + static_cast<uint64_t>(id) * 8191 + device);
      factor_ = random_() % 3 == 0 ? 8 : 1;
    }
    if (longest != 0 && random_() % 2 == 0)
      std::this_thread::sleep_for(std::chrono::microseconds(random_() % (longest * factor_)));
  }

  std::mutex lock_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> work_;
  uint64_t given_ = 0, done_ = 0, seeded_ = ~0ULL;
  bool started_ = false;
  int factor_ = 1;
  std::mt19937_64 random_;
};

// Never destroyed: threads of streams outlive whatever runs at exit.
struct Streams {
  Streams() {
    for (int device = 0; device < kDevices; ++device) {
      standard[device] = new Queue(device, 0);
      all.push_back(standard[device]);
    }
  }

  Queue* add(int device) {
    std::lock_guard hold(lock);
    all.push_back(new Queue(device, static_cast<int64_t>(16 * all.size())));
    return all.back();
  }

  Queue* draw(int device) {
    const int turn = drawn[device]++ % kPool;
    if (pool[device][turn] == nullptr) pool[device][turn] = add(device);
    return pool[device][turn];
  }

  Queue* find(int64_t id, int device) {
    std::lock_guard hold(lock);
    if (id == 0) return standard[device];
    TORCH_CHECK(id % 16 == 0 && static_cast<size_t>(id / 16) < all.size(), "no stream has the number ", id);
    return all[id / 16];
  }

  std::vector<Queue*> of(int device) {
    std::lock_guard hold(lock);
    std::vector<Queue*> found;
    for (auto* queue : all)
      if (queue->device == device) found.push_back(queue);
    return found;
  }

  std::mutex lock;
  std::vector<Queue*> all;
  std::array<Queue*, kDevices> standard;
  std::array<std::array<Queue*, kPool>, kDevices> pool{};
  std::array<std::atomic<int>, kDevices> drawn{};
};

Streams& streams() {
  static auto* only = new Streams();
  return *only;
}

thread_local int current_device = 0;
thread_local std::array<Queue*, kDevices> current_queue{};

Queue* current(int device) {
  auto*& queue = current_queue[device];
  if (queue == nullptr) queue = streams().standard[device];
  return queue;
}

c10::Stream stream_of(Queue* queue) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, queue->device), queue->id);
}

Queue* queue_of(const c10::Stream& stream) { return streams().find(stream.id(), stream.device_index()); }

// Memory

struct Block {
  void* address;
  size_t nbytes;
  Queue* owner;
};

struct Memory {
  c10::DataPtr take(size_t asked) {
    Queue* owner = current(current_device);
    const size_t nbytes = std::max<size_t>((asked + 511) / 512 * 512, 512);
    std::lock_guard hold(lock);
    auto& free = idle[{owner, nbytes}];
    Block* block;
    if (free.empty()) {
      block = new Block{std::aligned_alloc(512, nbytes), nbytes, owner};
      TORCH_CHECK_WITH(OutOfMemoryError, block->address != nullptr, "no ", nbytes, " bytes");
      std::memset(block->address, kFresh, nbytes);
      reserved[owner->device] += nbytes;
      all[reinterpret_cast<uintptr_t>(block->address)] = block;
    } else {
      block = free.back();
      free.pop_back();
    }
    return {block->address, block, &Memory::give_back, c10::Device(kType, owner->device)};
  }

  static void give_back(void* context);

  void empty(int device) {
    for (auto* queue : streams().of(device)) queue->wait_done(queue->given());
    std::lock_guard hold(lock);
    for (auto& [key, blocks] : idle) {
      if (key.first->device != device) continue;
      for (auto* block : blocks) {
        all.erase(reinterpret_cast<uintptr_t>(block->address));
        std::free(block->address);
        reserved[device] -= block->nbytes;
        delete block;
      }
      blocks.clear();
    }
  }

  // The device whose memory all of this is; -1 where it is none's.
  int device_of(uintptr_t address, size_t nbytes) {
    std::lock_guard hold(lock);
    auto after = all.upper_bound(address);
    if (after == all.begin()) return -1;
    const auto& [start, block] = *std::prev(after);
    return nbytes <= block->nbytes && address - start <= block->nbytes - nbytes ? block->owner->device : -1;
  }

  std::mutex lock;
  std::map<uintptr_t, Block*> all;
  std::map<std::pair<Queue*, size_t>, std::vector<Block*>> idle;
  std::array<int64_t, kDevices> reserved{};
};

Memory& memory() {
  static auto* only = new Memory();
  return *only;
}

void Memory::give_back(void* context) {
  auto* block = static_cast<Block*>(context);
  std::lock_guard hold(memory().lock);
  block->owner->give([block] { std::memset(block->address, kFreed, block->nbytes); });
  memory().idle[{block->owner, block->nbytes}].push_back(block);
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override { return memory().take(nbytes); }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { std::memcpy(to, from, nbytes); }
};

// Host memory that copies reach without a stop: what was pinned here, and what was registered.
struct Pinned {
  void add(const void* address, size_t nbytes) {
    std::lock_guard hold(lock);
    ranges[reinterpret_cast<uintptr_t>(address)] = nbytes;
  }

  void remove(const void* address) {
    std::lock_guard hold(lock);
    ranges.erase(reinterpret_cast<uintptr_t>(address));
  }

  bool has(const void* address, size_t nbytes = 1) {
    std::lock_guard hold(lock);
    const auto at = reinterpret_cast<uintptr_t>(address);
    auto after = ranges.upper_bound(at);
    if (after == ranges.begin()) return false;
    const auto& [start, length] = *std::prev(after);
    return nbytes <= length && at - start <= length - nbytes;
  }

  std::mutex lock;
  std::map<uintptr_t, size_t> ranges;
  std::map<size_t, std::vector<void*>> idle;
};

Pinned& pinned() {
  static auto* only = new Pinned();
  return *only;
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t asked) override {
    const size_t nbytes = std::max<size_t>((asked + 4095) / 4096 * 4096, 4096);
    std::unique_lock hold(pinned().lock);
    auto& free = pinned().idle[nbytes];
    void* address = free.empty() ? std::aligned_alloc(4096, nbytes) : free.back();
    if (!free.empty()) free.pop_back();
    hold.unlock();
    std::memset(address, kFresh, nbytes);
    pinned().add(address, nbytes);
    return {address, address, &give_back, c10::Device(c10::DeviceType::CPU)};
  }

  static void give_back(void* address) {
    std::lock_guard hold(pinned().lock);
    auto found = pinned().ranges.find(reinterpret_cast<uintptr_t>(address));
    const size_t nbytes = found->second;
    std::memset(address, kFreed, nbytes);
    pinned().ranges.erase(found);
    pinned().idle[nbytes].push_back(address);
  }

  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { std::memcpy(to, from, nbytes); }
};

// Streams and events, as torch asks for them

struct Mark {
  Queue* queue;
  uint64_t at;
  std::atomic<int64_t> nanoseconds{0};
};

using Event = std::shared_ptr<Mark>;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    current_device = device.index();
    return before;
  }
  c10::Device getDevice() const override { return c10::Device(kType, current_device); }
  void setDevice(c10::Device device) const override { current_device = device.index(); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { current_device = device.index(); }
  c10::Stream getStream(c10::Device device) const noexcept override { return stream_of(current(index(device))); }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_of(streams().standard[index(device)]);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return stream_of(streams().draw(index(device)));
  }
  c10::Stream getNewStream(c10::Device device, int) const override { return stream_of(streams().draw(index(device))); }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override {
    auto*& queue = current_queue[stream.device_index()];
    const c10::Stream before = stream_of(current(stream.device_index()));
    queue = queue_of(stream);
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(visible.load()); }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event();
    Queue* queue = queue_of(stream);
    auto mark = std::make_shared<Mark>();
    mark->queue = queue;
    mark->at =
        queue->give([mark] { mark->nanoseconds = std::chrono::steady_clock::now().time_since_epoch().count(); });
    *static_cast<Event*>(*event) = mark;
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr || *static_cast<Event*>(event) == nullptr) return;
    auto mark = *static_cast<Event*>(event);
    queue_of(stream)->give([mark] { mark->queue->wait_done(mark->at); });
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr || *static_cast<Event*>(event) == nullptr) return true;
    const auto& mark = *static_cast<Event*>(event);
    return mark->queue->has_done(mark->at);
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr || *static_cast<Event*>(event) == nullptr) return;
    auto mark = *static_cast<Event*>(event);
    mark->queue->wait_done(mark->at);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    return 1e-6 * static_cast<double>((*static_cast<Event*>(second))->nanoseconds -
                                      (*static_cast<Event*>(first))->nanoseconds);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  bool queryStream(const c10::Stream& stream) const override {
    Queue* queue = queue_of(stream);
    return queue->has_done(queue->given());
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Queue* queue = queue_of(stream);
    queue->wait_done(queue->given());
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    for (auto* queue : streams().of(device)) queue->wait_done(queue->given());
  }

 private:
  static int index(c10::Device device) { return device.has_index() ? device.index() : current_device; }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return visible > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(visible.load()); }
  void setCurrentDevice(c10::DeviceIndex device) const override { current_device = device; }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return static_cast<c10::DeviceIndex>(std::exchange(current_device, device));
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* data) const override { return pinned().has(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    TORCH_CHECK(visible > 0, "no device is there to pin memory for");
    static PinnedAllocator only;
    return &only;
  }
};

// Operators

at::Tensor on_cpu(const at::Tensor& tensor) {
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), tensor.options().device(c10::kCPU));
}

struct Within {  // a device is current while this lives
  explicit Within(int device) : before(std::exchange(current_device, device)) {}
  ~Within() { current_device = before; }
  int before;
};

at::Tensor empty(
    c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const Within within(device.has_value() && device->has_index() ? device->index() : current_device);
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), c10::GetAllocator(kType), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      dtype.value_or(at::kFloat), format);
}

at::Tensor empty_strided(
    c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const Within within(device.has_value() && device->has_index() ? device->index() : current_device);
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), c10::GetAllocator(kType),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype.value_or(at::kFloat));
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool may_return) {
  const bool is_out = from.is_privateuseone();
  Queue* queue = current(is_out ? from.device().index() : to.device().index());
  auto source = is_out ? on_cpu(from) : from, target = to.is_privateuseone() ? on_cpu(to) : to;
  const auto& host = is_out ? to : from;
  if (!host.is_privateuseone() && !pinned().has(host.data_ptr())) {
    may_return = may_return && !is_out;
    if (!is_out) source = from.clone();  // read at once, as from pageable memory
  } else if (!host.is_privateuseone()) {
    (is_out ? target : source) =
        at::from_blob(host.data_ptr(), host.sizes(), host.strides(), host.options());  // kept by nobody
  }
  const uint64_t at = queue->give([source, target]() mutable { target.copy_(source); });
  if (!may_return) queue->wait_done(at);
  return to;
}

at::Tensor as_strided(
    const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  return at::native::as_strided_tensorimpl(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset.has_value() ? std::optional<int64_t>(offset->expect_int()) : std::nullopt);
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::set_storage_cpu_(
      self, std::move(source), offset.expect_int(), C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

// Whatever else: torch's kernel for the CPU, on the stream's thread if nothing but arguments is returned.
void by_the_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size(), first = stack->size() - count;
  torch::jit::Stack given(stack->begin() + static_cast<ptrdiff_t>(first), stack->end()), aliases, written;
  int device = -1;
  const auto alias = [&](const c10::IValue& value) -> c10::IValue {
    if (!value.isTensor() || !value.toTensor().defined() || !value.toTensor().is_privateuseone()) return value;
    if (device < 0) device = value.toTensor().device().index();
    TORCH_CHECK(device == value.toTensor().device().index(), schema.name(), " was given tensors of two devices");
    return on_cpu(value.toTensor());
  };
  for (size_t at = 0; at < count; ++at) {
    const auto* info = schema.arguments()[at].alias_info();
    if (info != nullptr && info->isWrite()) written.push_back(given[at]);
    if (given[at].isTensorList()) {
      std::vector<at::Tensor> list;
      for (const at::Tensor& tensor : given[at].toTensorVector()) list.push_back(alias(tensor).toTensor());
      aliases.emplace_back(list);
    } else {
      aliases.push_back(alias(given[at]));
    }
  }
  TORCH_CHECK(device >= 0, schema.name(), " was given no tensor of the device");
  torch::jit::drop(*stack, count);
  Queue* queue = current(device);
  if (!written.empty()) {
    queue->give([op, aliases]() mutable { op.callBoxed(&aliases); });
    stack->insert(stack->end(), written.begin(), written.begin() + static_cast<ptrdiff_t>(schema.returns().size()));
    return;
  }
  queue->wait_done(queue->given());
  op.callBoxed(&aliases);
  for (const auto& value : aliases)
    stack->push_back(value.isTensor() ? c10::IValue(value.toTensor().to(c10::Device(kType, device))) : value);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&by_the_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("as_strided", &as_strided);
  library.impl("view", &view);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("_copy_from", [](const at::Tensor& from, const at::Tensor& to, bool may_return) {
    return copy_from(from, to, may_return);
  });
}

}  // namespace

extern "C" {

// Register the device with torch; once in a process, before anything else.
void async_start() {
  static DeviceAllocator allocator;
  static Guard guard;
  static Hooks hooks;
  c10::SetAllocator(kType, &allocator);
  c10::impl::device_guard_impl_registry[static_cast<size_t>(kType)].store(&guard);
  at::RegisterPrivateUse1HooksInterface(&hooks);
}

void async_show(int devices) { visible = devices; }

// Pauses of at most `longest` microseconds, eight times that on some streams; 0: none.
void async_pauses(uint64_t new_seed, int longest) {
  seed = new_seed;
  longest_pause = longest;
}

int64_t async_new_stream(int device) { return streams().add(device)->id; }

void async_launch(int device, int64_t stream, void (*run)(int64_t), int64_t argument) {
  streams().find(stream, device)->give([run, argument] { run(argument); });
}

int async_is_stream(int64_t id) {
  std::lock_guard hold(streams().lock);
  return id > 0 && id % 16 == 0 && static_cast<size_t>(id / 16) < streams().all.size();
}

int async_device_of(int64_t id) { return streams().find(id, 0)->device; }

void async_sleep(int64_t microseconds) { std::this_thread::sleep_for(std::chrono::microseconds(microseconds)); }

void async_wait(int device) {
  for (auto* queue : streams().of(device)) queue->wait_done(queue->given());
}

// Work that has failed since this was last asked.
uint64_t async_take_faults() { return faults.exchange(0); }

// Whose memory all of this is: a device's, by its number; -2: the host's, pinned; -1: none.
int async_whose(void* address, size_t nbytes) {
  const int device = memory().device_of(reinterpret_cast<uintptr_t>(address), nbytes);
  return device < 0 && pinned().has(address, nbytes) ? -2 : device;
}

// Work that the streams of a device were given so far, all of them or the default one.
uint64_t async_given(int device, int only_default) {
  uint64_t sum = 0;
  for (auto* queue : streams().of(device)) sum += only_default && queue->id != 0 ? 0 : queue->given();
  return sum;
}

int async_drawn(int device) { return streams().drawn[device]; }
int64_t async_reserved(int device) { return memory().reserved[device]; }
void async_empty_cache(int device) { memory().empty(device); }
void async_pin(void* address, size_t nbytes) { pinned().add(address, nbytes); }
void async_unpin(void* address) { pinned().remove(address); }
int async_device() { return current_device; }
void async_use_device(int device) { current_device = device; }

}  // extern "C"
