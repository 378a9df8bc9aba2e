// A small gateway that lets the policy service decide: an OpenAI-shaped request comes in, `model` names the route, the service
// names the target, and the answer of the target's upstream goes back, streamed or not.
//
//	go run . -config gateway.json
package main

//go:generate buf generate

import (
	"context"
	"errors"
	"flag"
	"log/slog"
	"net/http"
	"os"
	"os/signal"
	"syscall"
	"time"
)

func main() {
	path := flag.String("config", "gateway.json", "configuration file")
	flag.Parse()
	if err := serve(*path); err != nil {
		slog.Error("the gateway ends", "error", err)
		os.Exit(1)
	}
}

func serve(path string) error {
	config, err := LoadConfig(path)
	if err != nil {
		return err
	}
	service, err := Dial(config.Policy)
	if err != nil {
		return err
	}
	transport := NewTransport(config, service)
	server := &http.Server{Addr: config.Listen, Handler: NewHandler(transport), ReadHeaderTimeout: 10 * time.Second}

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	ended := make(chan error, 1)
	go func() { ended <- server.ListenAndServe() }()
	slog.Info("listening", "address", config.Listen, "policy", config.Policy.Address)
	select {
	case err := <-ended:
		return err
	case <-ctx.Done():
	}
	drain, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	return errors.Join(server.Shutdown(drain), transport.Close(drain))
}
