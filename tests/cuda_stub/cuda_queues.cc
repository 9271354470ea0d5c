// The CUDA stub's streams, events and memory.
#include <cstdlib>
#include <cstring>
#include <vector>

#include "cuda_machine.h"

namespace ringjax::cuda {

Outcome cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  STUB_ENTER(kContext);
  if (least != nullptr) *least = 0;
  if (greatest != nullptr) *greatest = -5;
  return kSuccess;
}

Outcome cuStreamCreateWithPriority(Stream* stream, unsigned flags, int) {
  STUB_ENTER(kContext);
  if (stream == nullptr || flags > kStreamNonBlocking) return kInvalidValue;
  auto created = std::make_shared<StreamTag>(t_current);
  *stream = created.get();
  std::lock_guard lock(g_machine.mutex);
  g_machine.streams[*stream] = std::move(created);
  return kSuccess;
}

Outcome cuStreamDestroy_v2(Stream handle) {
  STUB_ENTER(kInit);
  std::lock_guard lock(g_machine.mutex);
  const auto found = g_machine.streams.find(handle);
  if (found == g_machine.streams.end()) return kInvalidHandle;
  found->second->Close();
  g_machine.streams.erase(found);
  return kSuccess;
}

Outcome cuStreamQuery(Stream handle) {
  STUB_ENTER(kInit);
  const auto stream = FindStream(handle);
  if (!stream) return kInvalidHandle;
  return stream->Idle() ? kSuccess : kNotReady;
}

Outcome cuStreamSynchronize(Stream handle) {
  STUB_ENTER(kInit);
  const auto stream = FindStream(handle);
  if (!stream) return kInvalidHandle;
  stream->Drain();
  return kSuccess;
}

Outcome cuStreamWaitEvent(Stream handle, Event event, unsigned flags) {
  STUB_ENTER(kInit);
  if (flags != 0) return kInvalidValue;
  std::shared_ptr<Record> record;
  {
    std::lock_guard lock(g_machine.mutex);
    const EventTag* found = FindEvent(event);
    if (found == nullptr) return kInvalidHandle;
    record = found->last;
  }
  if (!record) return FindStream(handle) ? kSuccess : kInvalidHandle;
  return Enqueue(handle, [record] { record->Wait(); });
}

Outcome cuEventCreate(Event* event, unsigned flags) {
  STUB_ENTER(kContext);
  if (event == nullptr || flags > 7) return kInvalidValue;
  auto created = std::make_unique<EventTag>(EventTag{t_current, flags, nullptr});
  *event = created.get();
  std::lock_guard lock(g_machine.mutex);
  g_machine.events[*event] = std::move(created);
  return kSuccess;
}

Outcome cuEventDestroy_v2(Event event) {
  STUB_ENTER(kInit);
  std::lock_guard lock(g_machine.mutex);
  return g_machine.events.erase(event) == 1 ? kSuccess : kInvalidHandle;
}

Outcome cuEventRecord(Event event, Stream handle) {
  STUB_ENTER(kInit);
  const auto stream = FindStream(handle);
  if (!stream) return kInvalidHandle;
  auto record = std::make_shared<Record>();
  {
    std::lock_guard lock(g_machine.mutex);
    EventTag* found = FindEvent(event);
    if (found == nullptr || found->context != stream->context) return kInvalidHandle;
    found->last = record;
  }
  stream->Push([record] { record->Finish(); });
  return kSuccess;
}

Outcome cuEventQuery(Event event) {
  STUB_ENTER(kInit);
  std::lock_guard lock(g_machine.mutex);
  const EventTag* found = FindEvent(event);
  if (found == nullptr) return kInvalidHandle;
  return !found->last || found->last->done() ? kSuccess : kNotReady;
}

Outcome cuEventElapsedTime(float* milliseconds, Event start, Event end) {
  STUB_ENTER(kInit);
  if (milliseconds == nullptr) return kInvalidValue;
  std::lock_guard lock(g_machine.mutex);
  const EventTag *first = FindEvent(start), *second = FindEvent(end);
  if (first == nullptr || second == nullptr || !first->last || !second->last ||
      ((first->flags | second->flags) & kEventDisableTiming) != 0)
    return kInvalidHandle;
  if (!first->last->done() || !second->last->done()) return kNotReady;
  *milliseconds = std::chrono::duration<float, std::milli>(second->last->when() -
                                                           first->last->when())
                      .count();
  return kSuccess;
}

namespace {

std::byte* At(Pointer pointer) { return reinterpret_cast<std::byte*>(pointer); }

// The bytes of new and of freed memory, which are NaN in every float type.
constexpr int kUndefined = 0xff;

Outcome Allocate(Pointer* pointer, size_t bytes) {
  if (pointer == nullptr || bytes == 0) return kInvalidValue;
  if (bytes > PTRDIFF_MAX - 4096) return kOutOfMemory;
  void* memory = std::aligned_alloc(256, (bytes + 255) / 256 * 256);
  if (memory == nullptr) return kOutOfMemory;
  std::memset(memory, kUndefined, bytes);
  *pointer = reinterpret_cast<Pointer>(memory);
  std::lock_guard lock(g_machine.mutex);
  g_machine.memory[*pointer] = {bytes, t_current->device};
  return kSuccess;
}

// Removes an allocation and returns its bytes; 0 if there is none.
size_t Forget(Pointer pointer) {
  std::lock_guard lock(g_machine.mutex);
  const auto found = g_machine.memory.find(pointer);
  if (found == g_machine.memory.end()) return 0;
  const size_t bytes = found->second.bytes;
  g_machine.memory.erase(found);
  return bytes;
}

void Free(Pointer pointer, size_t bytes) {
  std::memset(At(pointer), kUndefined, bytes);
  std::free(At(pointer));
}

}  // namespace

// Memory that was not allocated here is an array of the caller, on the current device.
Outcome cuPointerGetAttribute(void* value, int attribute, Pointer at) {
  STUB_ENTER(kInit);
  if (value == nullptr || attribute != kPointerDevice || at == 0) return kInvalidValue;
  std::lock_guard lock(g_machine.mutex);
  Device device = t_current != nullptr ? t_current->device : 0;
  const auto after = g_machine.memory.upper_bound(at);
  if (after != g_machine.memory.begin()) {
    const auto& [begin, memory] = *std::prev(after);
    if (at - begin < memory.bytes) device = memory.device;
  }
  *static_cast<int*>(value) = device;
  return kSuccess;
}

void stub_cuda_alive(size_t* events, size_t* streams, size_t* memory) {
  std::lock_guard lock(g_machine.mutex);
  *events = g_machine.events.size();
  *streams = g_machine.streams.size();
  *memory = g_machine.memory.size();
}

unsigned long long stub_cuda_pushed(Stream handle) {
  const auto stream = FindStream(handle);
  return stream ? stream->Pushed() : 0;
}

Outcome cuMemAlloc_v2(Pointer* pointer, size_t bytes) {
  STUB_ENTER(kContext);
  return Allocate(pointer, bytes);
}

// Waits for the whole device, as the driver does, so a call must not use it.
Outcome cuMemFree_v2(Pointer pointer) {
  STUB_ENTER(kContext);
  if (pointer == 0) return kSuccess;
  const size_t bytes = Forget(pointer);
  if (bytes == 0) return kInvalidValue;
  std::vector<std::shared_ptr<StreamTag>> all;
  {
    std::lock_guard lock(g_machine.mutex);
    for (const auto& [handle, stream] : g_machine.streams)
      if (stream->context == t_current) all.push_back(stream);
    if (t_current->default_stream) all.push_back(t_current->default_stream);
  }
  for (const auto& stream : all) stream->Drain();
  Free(pointer, bytes);
  return kSuccess;
}

Outcome cuMemAllocAsync(Pointer* pointer, size_t bytes, Stream stream) {
  STUB_ENTER(kContext);
  return FindStream(stream) ? Allocate(pointer, bytes) : kInvalidHandle;
}

Outcome cuMemFreeAsync(Pointer pointer, Stream handle) {
  STUB_ENTER(kContext);
  const auto stream = FindStream(handle);
  if (!stream) return kInvalidHandle;
  if (pointer == 0) return kSuccess;
  const size_t bytes = Forget(pointer);
  if (bytes == 0) return kInvalidValue;
  stream->Push([=] { Free(pointer, bytes); });
  return kSuccess;
}

Outcome cuMemcpyDtoDAsync_v2(Pointer to, Pointer from, size_t bytes, Stream stream) {
  STUB_ENTER(kContext);
  if (bytes > 0 && (to == 0 || from == 0)) return kInvalidValue;
  return Enqueue(stream, [=] { std::memmove(At(to), At(from), bytes); });
}

// Host memory is pageable here, so it is read before the call returns.
Outcome cuMemcpyHtoDAsync_v2(Pointer to, const void* from, size_t bytes,
                             Stream stream) {
  STUB_ENTER(kContext);
  if (bytes > 0 && (to == 0 || from == nullptr)) return kInvalidValue;
  const auto* first = static_cast<const std::byte*>(from);
  auto staged = std::make_shared<std::vector<std::byte>>(first, first + bytes);
  return Enqueue(stream, [=] { std::memcpy(At(to), staged->data(), bytes); });
}

// Host memory is pageable here, so the call waits for the copy and all work before it.
Outcome cuMemcpyDtoHAsync_v2(void* to, Pointer from, size_t bytes, Stream handle) {
  STUB_ENTER(kContext);
  if (bytes > 0 && (to == nullptr || from == 0)) return kInvalidValue;
  const auto stream = FindStream(handle);
  if (!stream) return kInvalidHandle;
  stream->Push([=] { std::memcpy(to, At(from), bytes); });
  stream->Drain();
  return kSuccess;
}

Outcome cuMemsetD32Async(Pointer at, unsigned value, size_t count, Stream stream) {
  STUB_ENTER(kContext);
  if ((count > 0 && at == 0) || at % 4 != 0) return kInvalidValue;
  g_machine.log.Write("{\"pid\": " + std::to_string(getpid()) +
                      ", \"memset\": " + std::to_string(value) +
                      ", \"count\": " + std::to_string(count) + "}");
  return Enqueue(stream,
                 [=] { std::fill_n(reinterpret_cast<unsigned*>(at), count, value); });
}

}  // namespace ringjax::cuda
