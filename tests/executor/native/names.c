/* getaddrinfo as a module of nsswitch.conf may make it: it knows the name duck.test,
   with the addresses of DUCK_TEST_ADDRESSES, and DNS does not. Preloaded by
   test_names.py. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <netdb.h>
#include <stdlib.h>
#include <string.h>

typedef int (*lookup)(const char *, const char *, const struct addrinfo *,
                      struct addrinfo **);

int getaddrinfo(const char *node, const char *service, const struct addrinfo *hints,
                struct addrinfo **found) {
  lookup real = (lookup)dlsym(RTLD_NEXT, "getaddrinfo");
  const char *suffix = node ? strstr(node, ".test") : NULL;
  if (!suffix) return real(node, service, hints, found);
  if (strcmp(node, "duck.test")) return EAI_NONAME;
  char *addresses = strdup(getenv("DUCK_TEST_ADDRESSES"));
  for (char *each = strtok(addresses, " "); each; each = strtok(NULL, " ")) {
    if (real(each, service, hints, found)) return EAI_FAIL;
    while (*found) found = &(*found)->ai_next;
  }
  free(addresses);
  return 0;
}
