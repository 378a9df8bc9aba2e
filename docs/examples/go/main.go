// A small gateway that lets the policy service decide: an OpenAI-shaped request comes in, `model` names the route, the service
// names the target, and the answer of the target's upstream goes back, streamed or not.
//
//	go run . -config gateway.json
//
// The file may also stand by itself, and gateway.json is what is read where none is named.
//
// Exit codes: 0 ended by a signal, 1 it cannot listen, 2 the configuration cannot be used.
package main

//go:generate buf generate

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"
)

const (
	cannotServe   = 1
	cannotBeUsed  = 2
	headerTimeout = 10 * time.Second
	idleTimeout   = 2 * time.Minute // of a client's connection between two requests
	lastReports   = 5 * time.Second // for the reports of the last requests
)

func main() {
	path, err := fileOf(os.Args[1:])
	if err != nil {
		end(cannotBeUsed, fmt.Errorf("%w: say FILE or -config FILE, and nothing else", err))
	}
	config, transport, err := configured(path)
	if err != nil {
		end(cannotBeUsed, fmt.Errorf("%s: %w", path, err))
	}
	if err := serve(config, transport); err != nil {
		end(cannotServe, err)
	}
}

// end says in one line why.
func end(code int, err error) {
	fmt.Fprintln(os.Stderr, "gateway:", strings.ReplaceAll(err.Error(), "\n", "; "))
	os.Exit(code)
}

// fileOf is the configuration file that the command line names.
func fileOf(arguments []string) (string, error) {
	flags := flag.NewFlagSet("gateway", flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	path := flags.String("config", "", "")
	err := flags.Parse(arguments)
	left := flags.Args()
	if *path == "" && len(left) > 0 {
		*path, left = left[0], left[1:]
	}
	if err == nil && len(left) > 0 {
		err = fmt.Errorf("%q is one argument too many", left[0])
	}
	return cmp.Or(*path, "gateway.json"), err
}

func configured(path string) (*Config, *Transport, error) {
	config, err := LoadConfig(path)
	if err != nil {
		return nil, nil, err
	}
	service, err := Dial(config.Policy)
	if err != nil {
		return nil, nil, err
	}
	return config, NewTransport(config, service), nil
}

func serve(config *Config, transport *Transport) error {
	listener, err := net.Listen("tcp", config.Listen)
	if errors.Is(err, syscall.EADDRINUSE) {
		return fmt.Errorf("cannot listen on %s: the address is in use: end what listens there, or change `listen`", config.Listen)
	} else if err != nil {
		return fmt.Errorf("cannot listen on %s: %w: change `listen`", config.Listen, err)
	}
	server := &http.Server{Handler: NewHandler(transport), ReadHeaderTimeout: headerTimeout, IdleTimeout: idleTimeout}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	ended := make(chan error, 1)
	go func() { ended <- server.Serve(listener) }()
	slog.Info("listening", "address", config.Listen, "policy", config.Policy.Address)
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
		stop() // a second signal ends it at once
		return drain(server, transport, milliseconds(config.DrainMs))
	}
}

// drain serves what is under way to its end, or ends it when the time is over; then the reports have a time of their own.
func drain(server *http.Server, transport *Transport, longest time.Duration) error {
	requests, cancel := context.WithTimeout(context.Background(), longest)
	defer cancel()
	if server.Shutdown(requests) != nil {
		server.Close() // cancels the requests, whose last reports are sent then
	}
	reports, cancel := context.WithTimeout(context.Background(), lastReports)
	defer cancel()
	return transport.Close(reports)
}
