// The yardstick of TLS in benchmarks/rpc.py: the frames of raw_tcp.cpp over OpenSSL's
// own sockets, blocking, one SSL_write and as many SSL_read as it takes. Built by
// raw_tcp.py.
#include <arpa/inet.h>
#include <openssl/ssl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#include "raw_frames.h"

namespace {

SSL_CTX* make_context(const SSL_METHOD* method) {
  SSL_CTX* context = SSL_CTX_new(method);
  SSL_CTX_set_min_proto_version(context, TLS1_3_VERSION);
  // As the stream prefers.
  SSL_CTX_set_ciphersuites(context, "TLS_AES_128_GCM_SHA256");
  return context;
}

SSL* over(SSL_CTX* context, int socket) {
  SSL* ssl = SSL_new(context);
  SSL_set_fd(ssl, socket);
  return ssl;
}

bool read_all(SSL* ssl, void* to, size_t size) {
  for (size_t done = 0, got = 0; done < size; done += got)
    if (SSL_read_ex(ssl, static_cast<char*>(to) + done, size - done, &got) != 1)
      return false;
  return true;
}

bool write_all(SSL* ssl, const void* from, size_t size) {
  size_t done = 0;
  return SSL_write_ex(ssl, from, size, &done) == 1;
}

void serve_one(SSL* ssl) {
  std::vector<uint8_t> data;
  Header header;
  if (SSL_accept(ssl) == 1)
    while (read_all(ssl, &header, sizeof header)) {
      data.resize(header.size);
      if (!read_all(ssl, data.data(), data.size()) ||
          !write_all(ssl, data.data(), header.reply_size))
        break;
    }
  close(SSL_get_fd(ssl));
  SSL_free(ssl);
}

struct Client {
  SSL_CTX* context;
  std::vector<SSL*> connections;
  std::vector<uint8_t> request, reply;
};

}  // namespace

extern "C" {

void* raw_connect(int num_ducks, const char* const* addresses, int port) {
  auto* client = new Client{make_context(TLS_client_method()), {}, {}, {}};
  for (int i = 0; i < num_ducks; ++i) {
    int socket = connect_to(inet_addr(addresses[i]), port);
    if (socket < 0) return nullptr;
    SSL* ssl = over(client->context, socket);
    if (SSL_connect(ssl) != 1) return nullptr;
    client->connections.push_back(ssl);
  }
  return client;
}

// Sends `size` bytes to all, waits for all replies and adds them up, in order.
int raw_call(void* handle, const uint8_t* data, uint32_t size, uint32_t reply_size,
             float* out) {
  auto* client = static_cast<Client*>(handle);
  Header header{size, reply_size};
  client->request.resize(sizeof header + size);
  std::memcpy(client->request.data(), &header, sizeof header);
  std::memcpy(client->request.data() + sizeof header, data, size);
  for (SSL* ssl : client->connections)
    if (!write_all(ssl, client->request.data(), client->request.size())) return -1;
  client->reply.resize(reply_size);
  for (SSL* ssl : client->connections) {
    if (!read_all(ssl, client->reply.data(), reply_size)) return -1;
    auto* partial = reinterpret_cast<const uint16_t*>(client->reply.data());
    (ssl == client->connections[0] ? set : add)(partial, reply_size / 2, out);
  }
  return 0;
}

void raw_close(void* handle) {
  auto* client = static_cast<Client*>(handle);
  for (SSL* ssl : client->connections) {
    close(SSL_get_fd(ssl));
    SSL_free(ssl);
  }
  SSL_CTX_free(client->context);
  delete client;
}

// Serves for ever, each connection with a thread; prints its port.
void raw_serve(const char* certificate, const char* key) {
  SSL_CTX* context = make_context(TLS_server_method());
  if (SSL_CTX_use_certificate_chain_file(context, certificate) != 1 ||
      SSL_CTX_use_PrivateKey_file(context, key, SSL_FILETYPE_PEM) != 1)
    return;
  int listener = open_listener(htonl(INADDR_LOOPBACK));
  for (;;) {
    int socket = accept(listener, nullptr, nullptr);
    set_up(socket);
    std::thread(serve_one, over(context, socket)).detach();
  }
}
}
