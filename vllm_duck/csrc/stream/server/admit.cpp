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
  if (!is_health && !peer->is_host) {
    peer->is_host = true;
    strangers_.forget(peer->id());
  }
  size_t max_calls = peer->is_host ? options_.max_calls : Strangers::kMaxCalls;
  if ((peer->is_host ? num_calls_ : peer->num_calls()) >= max_calls)
    return {kStatusResourceExhausted,
            "the duck serves " + std::to_string(max_calls) + " calls at once"};
  // A host has one; whoever has more of them leaves the others theirs.
  size_t max_share = std::max<size_t>(1, options_.max_calls / kMinHosts);
  if (peer->is_host && peer->num_calls() >= max_share)
    return {kStatusResourceExhausted,
            "a connection has " + std::to_string(max_share) + " calls at once"};
  num_calls_ += peer->is_host;
  return {};
}

}  // namespace duck::stream
