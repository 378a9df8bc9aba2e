package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"sync/atomic"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	_ "google.golang.org/grpc/health" // lets the channel watch the health of replicas
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/resolver/manual"
	"google.golang.org/grpc/status"

	policyv1 "policyservice.example/gateway/gen/policy/v1"
)

// The retries are gRPC's own: it repeats what failed with UNAVAILABLE, and a `grpc-retry-pushback-ms` of the service takes
// precedence over the backoff. A replica that drains says so by its health, and the channel turns to another one.
const serviceConfig = `{
  "loadBalancingConfig": [{"round_robin": {}}],
  "healthCheckConfig": {"serviceName": "readiness"},
  "methodConfig": [{
    "name": [{"service": "policy.v1.PolicyService"}],
    "retryPolicy": {
      "maxAttempts": 4,
      "initialBackoff": "0.05s",
      "maxBackoff": "1s",
      "backoffMultiplier": 2,
      "retryableStatusCodes": ["UNAVAILABLE"]
    }
  }]
}`

// restAfterLoss is how long the service is not asked again once it was found to be away.
const restAfterLoss = time.Second

// ErrAway means that nobody answers; everything else that goes wrong is an answer of the service.
var ErrAway = errors.New("the policy service is away")

// errResting: it was found to be away a moment ago and is not asked.
var errResting = fmt.Errorf("%w: not asked for a moment", ErrAway)

// Service is the gateway's connection to the policy service.
type Service struct {
	policyv1.PolicyServiceClient
	connection *grpc.ClientConn
	config     PolicyConfig
	awayUntil  atomic.Int64 // Unix ms
}

// Dial connects in the background: a service that is not there yet is no error.
func Dial(config PolicyConfig) (*Service, error) {
	security, err := transportSecurity(config.CAFile)
	if err != nil {
		return nil, err
	}
	options := []grpc.DialOption{
		grpc.WithTransportCredentials(security),
		grpc.WithDefaultServiceConfig(serviceConfig),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 30 * time.Second, PermitWithoutStream: true}),
		grpc.WithConnectParams(grpc.ConnectParams{MinConnectTimeout: time.Second, Backoff: backoff.Config{
			BaseDelay: 50 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: time.Second}}),
	}
	if config.Key != "" {
		options = append(options, grpc.WithPerRPCCredentials(bearerKey(config.Key)))
	}
	if list, found := strings.CutPrefix(config.Address, "ipv4:"); found {
		options = append(options, grpc.WithResolvers(replicas(list)))
	}
	connection, err := grpc.NewClient(config.Address, options...)
	if err != nil {
		return nil, err
	}
	connection.Connect()
	return &Service{PolicyServiceClient: policyv1.NewPolicyServiceClient(connection), connection: connection, config: config}, nil
}

func transportSecurity(caFile string) (credentials.TransportCredentials, error) {
	if caFile == "" {
		return insecure.NewCredentials(), nil
	}
	text, err := os.ReadFile(caFile)
	if err != nil {
		return nil, err
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(text) {
		return nil, fmt.Errorf("%s: no certificate in it", caFile)
	}
	return credentials.NewTLS(&tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}), nil
}

// replicas resolves ipv4:HOST:PORT,HOST:PORT, which other gRPC libraries know by themselves.
func replicas(list string) resolver.Builder {
	builder := manual.NewBuilderWithScheme("ipv4")
	var addresses []resolver.Address
	for _, address := range strings.Split(list, ",") {
		host, _, _ := net.SplitHostPort(address)
		addresses = append(addresses, resolver.Address{Addr: address, ServerName: host})
	}
	builder.InitialState(resolver.State{Addresses: addresses})
	return builder
}

type bearerKey string

func (k bearerKey) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return map[string]string{"authorization": "Bearer " + string(k)}, nil
}

// RequireTransportSecurity is false because Config has checked that a key leaves the host over TLS only.
func (k bearerKey) RequireTransportSecurity() bool { return false }

// Select asks where to go. `wait` is how long the call may stand in line.
func (s *Service) Select(
	ctx context.Context, request *policyv1.SelectTargetRequest, wait time.Duration,
) (*policyv1.SelectTargetResponse, error) {
	mustAsk := request.GetLease() != nil
	if !mustAsk && time.Now().UnixMilli() < s.awayUntil.Load() {
		return nil, fmt.Errorf("%w (%s)", errResting, s.config.Address)
	}
	limited, cancel := context.WithTimeout(ctx, wait+milliseconds(s.config.SelectTimeoutMs))
	defer cancel()
	answer, err := s.SelectTarget(limited, request)
	return answer, s.judged(ctx, err)
}

// Report tells what came back and hears what it means.
func (s *Service) Report(ctx context.Context, request *policyv1.ReportOutcomeRequest) (*policyv1.ReportOutcomeResponse, error) {
	limited, cancel := context.WithTimeout(ctx, milliseconds(s.config.ReportTimeoutMs))
	defer cancel()
	answer, err := s.ReportOutcome(limited, request)
	return answer, s.judged(ctx, err)
}

// Fence asks whether a lease still holds.
func (s *Service) Fence(ctx context.Context, request *policyv1.CheckFenceRequest) (*policyv1.CheckFenceResponse, error) {
	limited, cancel := context.WithTimeout(ctx, milliseconds(s.config.ReportTimeoutMs))
	defer cancel()
	answer, err := s.CheckFence(limited, request)
	return answer, s.judged(ctx, err)
}

// Renew extends the permits of a decision.
func (s *Service) Renew(ctx context.Context, token []byte) (*policyv1.RenewPermitResponse, error) {
	limited, cancel := context.WithTimeout(ctx, milliseconds(s.config.ReportTimeoutMs))
	defer cancel()
	answer, err := s.RenewPermit(limited, &policyv1.RenewPermitRequest{DecisionToken: token})
	return answer, s.judged(ctx, err)
}

// Release frees the permits of a decision that will send no final report.
func (s *Service) Release(ctx context.Context, token []byte) error {
	limited, cancel := context.WithTimeout(ctx, milliseconds(s.config.ReportTimeoutMs))
	defer cancel()
	_, err := s.ReleasePermit(limited, &policyv1.ReleasePermitRequest{DecisionToken: token})
	return s.judged(ctx, err)
}

// Cancel gives back what a SelectTarget holds whose answer did not arrive; `found`: there was something.
func (s *Service) Cancel(ctx context.Context, requestID string) (found bool, err error) {
	limited, cancel := context.WithTimeout(ctx, milliseconds(s.config.ReportTimeoutMs))
	defer cancel()
	answer, err := s.CancelPermit(limited, &policyv1.CancelPermitRequest{RequestId: requestID})
	return len(answer.GetResults()) > 0, s.judged(ctx, err)
}

// judged turns errors that are not the service's own into ErrAway, and remembers them for a moment. A client that has left
// says nothing about the service.
func (s *Service) judged(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err == nil {
		s.awayUntil.Store(0)
		return nil
	}
	if isAway(err) {
		s.awayUntil.Store(time.Now().Add(restAfterLoss).UnixMilli())
		return fmt.Errorf("%w (%s): %w", ErrAway, s.config.Address, err)
	}
	return err
}

// isAway: a failure without ErrorInfo is the transport's. A replica that starts or ends says so itself and is away as well.
func isAway(err error) bool {
	switch reasonOf(err) {
	case "DRAINING", "NOT_READY":
		return true
	case "":
		code := status.Code(err)
		return code == codes.Unavailable || code == codes.DeadlineExceeded || code == codes.Canceled || code == codes.Internal
	}
	return false
}

// isCutOff: the call was made, and nobody knows what the service did with it.
func isCutOff(err error) bool {
	return err != nil && !errors.Is(err, errResting) && reasonOf(err) == ""
}

// isPassing: the same call may go well later. Other refusals are final.
func isPassing(err error) bool {
	switch status.Code(err) {
	case codes.Unavailable, codes.ResourceExhausted, codes.DeadlineExceeded:
		return true
	}
	return errors.Is(err, ErrAway)
}

// reasonOf is ErrorInfo.reason: the name of an ErrorReason; empty where the service did not send the error.
func reasonOf(err error) string {
	for _, detail := range status.Convert(err).Details() {
		if info, ok := detail.(*errdetails.ErrorInfo); ok && info.GetDomain() == "policy.v1" {
			return info.GetReason()
		}
	}
	return ""
}
