/* A resolver for one process: preloaded, it answers getaddrinfo from the file that PACELINE_TEST_NAMES names and asks
   nobody. The file is read anew for each question, so that a test changes an answer by writing it. A line is
   NAME=ADDRESS,ADDRESS,... or NAME=!none, !again, !fail, !hang. A name that no line has does not exist. */

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netdb.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

static int add(struct addrinfo ***end, const char *text, const struct addrinfo *hints) {
    struct sockaddr_in v4 = {.sin_family = AF_INET};
    struct sockaddr_in6 v6 = {.sin6_family = AF_INET6};
    int six = strchr(text, ':') != NULL;
    if (inet_pton(six ? AF_INET6 : AF_INET, text, six ? (void *)&v6.sin6_addr : (void *)&v4.sin_addr) != 1)
        return EAI_FAIL;
    /* One block, as glibc's freeaddrinfo expects it. */
    struct addrinfo *one = calloc(1, sizeof *one + sizeof v6);
    if (one == NULL)
        return EAI_MEMORY;
    one->ai_family = six ? AF_INET6 : AF_INET;
    one->ai_socktype = hints != NULL && hints->ai_socktype != 0 ? hints->ai_socktype : SOCK_STREAM;
    one->ai_addrlen = six ? sizeof v6 : sizeof v4;
    one->ai_addr = (struct sockaddr *)(one + 1);
    memcpy(one->ai_addr, six ? (void *)&v6 : (void *)&v4, one->ai_addrlen);
    **end = one;
    *end = &one->ai_next;
    return 0;
}

static int answer(char *said, const struct addrinfo *hints, struct addrinfo **found) {
    if (strcmp(said, "!none") == 0)
        return EAI_NONAME;
    if (strcmp(said, "!again") == 0)
        return EAI_AGAIN;
    if (strcmp(said, "!fail") == 0)
        return EAI_FAIL;
    if (strcmp(said, "!hang") == 0) {
        sleep(20);
        return EAI_AGAIN;
    }
    struct addrinfo **end = found;
    char *rest = NULL;
    for (char *one = strtok_r(said, ",", &rest); one != NULL; one = strtok_r(NULL, ",", &rest)) {
        int wrong = add(&end, one, hints);
        if (wrong != 0)
            return wrong;
    }
    return 0;
}

int getaddrinfo(const char *node, const char *service, const struct addrinfo *hints, struct addrinfo **found) {
    const char *path = getenv("PACELINE_TEST_NAMES");
    FILE *file = path != NULL && node != NULL && service == NULL ? fopen(path, "r") : NULL;
    char *line = NULL;
    size_t room = 0;
    int verdict = EAI_NONAME;
    *found = NULL;
    while (file != NULL && getline(&line, &room, file) > 0) {
        line[strcspn(line, "\n")] = 0;
        char *said = strchr(line, '=');
        if (said == NULL)
            continue;
        *said++ = 0;
        if (strcasecmp(line, node) == 0) {
            verdict = answer(said, hints, found);
            break;
        }
    }
    free(line);
    if (file != NULL)
        fclose(file);
    return verdict;
}
