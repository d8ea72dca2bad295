#include "stream/server/job.h"

#include <new>

namespace duck::stream {
namespace {

uint32_t microseconds(Clock::duration time) {
  return uint32_t(std::chrono::duration_cast<std::chrono::microseconds>(time).count());
}

// Tensors of a message lie at any address; a kernel reads whole numbers.
template <class T>
const T* aligned(Slice tensor, Message* copy) {
  if (reinterpret_cast<uintptr_t>(tensor.data) % alignof(T) == 0)
    return reinterpret_cast<const T*>(tensor.data);
  *copy = Message(tensor.size);
  copy->append(tensor.data, tensor.size);
  return reinterpret_cast<const T*>(copy->data());
}

PayloadRef computed(const Compute& compute, const Job& job) {
  const RequestView& request = job.request;
  std::string problem = misfit(request);
  if (!problem.empty())
    return encode_refusal(request.request_id, ForwardStatus::kInvalidRequest, problem);
  Message copies[3];
  ReplyWriter reply(request);
  bool is_fp32 = request.dtype() == DType::kF32;
  ForwardCall call = {request.layer_idx,
                      request.num_rows,
                      request.hidden_size,
                      request.num_topk,
                      aligned<uint16_t>(request.hidden, &copies[0]),
                      aligned<int32_t>(request.topk_ids, &copies[1]),
                      aligned<float>(request.topk_weights, &copies[2]),
                      is_fp32 ? reinterpret_cast<float*>(reply.partial()) : nullptr,
                      is_fp32 ? nullptr : reinterpret_cast<uint16_t*>(reply.partial()),
                      job.is_long};
  char error[512] = "";
  auto start = Clock::now();
  ForwardStatus status = compute.forward(compute.context, call, error, sizeof error);
  auto end = Clock::now();
  if (status != ForwardStatus::kOk)
    return encode_refusal(request.request_id, status, error);
  return reply.seal(microseconds(start - job.arrival), microseconds(end - start));
}

PayloadRef out_of_memory(uint64_t request_id) {
  try {
    return encode_refusal(request_id, ForwardStatus::kInternal,
                          "the duck has no memory for the request");
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

}  // namespace

void answer(const Compute& compute, Job* job) noexcept {
  try {
    job->reply = computed(compute, *job);
  } catch (const std::bad_alloc&) {
    job->message = Message();
    job->reply = out_of_memory(job->request.request_id);
  }
  job->message = Message();
}

}  // namespace duck::stream
