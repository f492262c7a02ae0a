// Go's net/http with its default transport, by the clients' protocol (see tests/it/py/protocol.py).
package main

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
)

func say(answer *http.Response, err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	defer answer.Body.Close()
	body, err := io.ReadAll(answer.Body)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	retry := answer.Header.Get("Retry-After")
	if retry == "" {
		retry = "-"
	}
	fmt.Printf("%d %s %x\n", answer.StatusCode, retry, sha256.Sum256(body))
}

func main() {
	if os.Args[1] == "get" {
		for _, url := range os.Args[2:] {
			say(http.Get(url))
		}
		return
	}
	length, _ := strconv.Atoi(os.Args[3])
	body := make([]byte, length)
	for n := range body {
		body[n] = byte(n % 251)
	}
	say(http.Post(os.Args[2], "application/octet-stream", bytes.NewReader(body)))
}
