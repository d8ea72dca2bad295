"""The native stream: gRPC in C++ on nghttp2, both ends."""
