// Who is let in to a server, and for how many calls.
#include <algorithm>

#include "stream/server/secrets.h"
#include "stream/server/server.h"

namespace duck::stream {
namespace {

constexpr const char* kHealthPrefix = "/grpc.health.v1.Health/";

}  // namespace

Status Server::admit(Peer* peer, const std::string& method, const Headers& headers) {
  const std::string* type = find_header(headers, "content-type");
  if (!type || type->rfind("application/grpc", 0) != 0)
    return {kStatusInternal, "expected the content type application/grpc"};
  bool is_health = method.rfind(kHealthPrefix, 0) == 0;
  if (!options_.authorization.empty() && !is_health) {
    const std::string* sent = find_header(headers, "authorization");
    if (!sent || !equal_secrets(*sent, options_.authorization))
      return {kStatusUnauthenticated, "the duck's token is missing or wrong"};
  }
  if (is_draining_) return {kStatusUnavailable, "the duck is shutting down"};
  if (method != kForwardPath && is_control_behind())
    return {kStatusUnavailable, "too many calls wait for the duck's answer"};
  if (!is_health && !peer->is_host()) {
    Status status = admit_host(peer);
    if (status.code != kStatusOk) return status;
  }
  return admit_call(peer);
}

Status Server::admit_host(Peer* peer) {
  constexpr size_t kMax = kMaxPeers - kMaxPeers / kMinHosts;
  ShareRef share = shares_.of(peer->connection().socket());
  if (share->num_connections >= kMax)
    return {kStatusResourceExhausted, "the hosts of an address have " +
                                          std::to_string(kMax) +
                                          " connections at once"};
  peer->become_host(std::move(share));
  strangers_.forget(peer->id());
  return {};
}

Status Server::admit_call(Peer* peer) {
  auto refusal = [](const char* who, size_t max_calls) -> Status {
    return {kStatusResourceExhausted,
            who + std::to_string(max_calls) + " calls at once"};
  };
  if (!peer->is_host())
    return peer->num_calls() < Strangers::kMaxCalls
               ? Status{}
               : refusal("the duck serves ", Strangers::kMaxCalls);
  // A host needs one; whoever has more of them leaves the others theirs.
  size_t max_share = std::max<size_t>(1, options_.max_calls / kMinHosts);
  size_t max_of_address = std::max<size_t>(1, options_.max_calls - max_share);
  if (num_calls_ >= options_.max_calls)
    return refusal("the duck serves ", options_.max_calls);
  if (peer->num_calls() >= max_share) return refusal("a connection has ", max_share);
  if (peer->share()->num_calls >= max_of_address)
    return refusal("the hosts of an address have ", max_of_address);
  ++num_calls_;
  ++peer->share()->num_calls;
  return {};
}

}  // namespace duck::stream
