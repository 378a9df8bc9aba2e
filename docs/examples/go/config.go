package main

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"reflect"
	"strings"
	"time"
)

// Config is the file that main reads. Times are milliseconds, as everywhere in the contract.
type Config struct {
	Listen string       `json:"listen"`
	Policy PolicyConfig `json:"policy"`
	// FailMode says what happens while the service is away: "open" follows the last known order, "closed" answers 503.
	FailMode string `json:"fail_mode"`
	// RequestTimeoutMs is how long a client waits for its answer to begin: waits and attempts together.
	RequestTimeoutMs int64 `json:"request_timeout_ms"`
	// FirstByteTimeoutMs and IdleTimeoutMs end one attempt: no answer, or silence in the middle of one.
	FirstByteTimeoutMs int64 `json:"first_byte_timeout_ms"`
	IdleTimeoutMs      int64 `json:"idle_timeout_ms"`
	// DrainMs is how long requests under way may take when the gateway is ended.
	DrainMs int64 `json:"drain_ms"`
	// Routes gives the route of a model that clients name; a model that is not listed is its own route.
	Routes map[string]string `json:"routes"`
	// Upstreams has an entry "provider/connection" for every connection of the service's catalogue.
	Upstreams map[string]Upstream `json:"upstreams"`
	path      string
}

// PolicyConfig says where the service is and how to talk to it.
type PolicyConfig struct {
	// Address: host:port, unix:PATH, or ipv4:HOST:PORT,HOST:PORT for several replicas.
	Address string `json:"address"`
	// CAFile switches TLS on and is what the service's certificate is checked against.
	CAFile string `json:"ca_file"`
	// Key is the bearer key; empty where the service asks for none.
	Key string `json:"key"`
	// SelectTimeoutMs and ReportTimeoutMs are the deadlines of the two calls, waiting in line not counted.
	SelectTimeoutMs int64 `json:"select_timeout_ms"`
	ReportTimeoutMs int64 `json:"report_timeout_ms"`
}

// Upstream is where one connection is reached, and the headers that carry its credential.
type Upstream struct {
	BaseURL string            `json:"base_url"`
	Headers map[string]string `json:"headers"`
	base    *url.URL
}

// LoadConfig reads the file. $NAME in `policy.key` and in headers is replaced by the environment variable.
func LoadConfig(path string) (*Config, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		err = errors.Unwrap(err) // without the path, which main names
		return nil, fmt.Errorf("%w: write it, or name another one with -config FILE", err)
	}
	config := &Config{
		Listen:             "127.0.0.1:8080",
		Policy:             PolicyConfig{Address: "127.0.0.1:50051", SelectTimeoutMs: 250, ReportTimeoutMs: 1000},
		FailMode:           "open",
		RequestTimeoutMs:   60_000,
		FirstByteTimeoutMs: 30_000,
		IdleTimeoutMs:      30_000,
		DrainMs:            10_000,
		path:               path,
	}
	reader := json.NewDecoder(bytes.NewReader(text))
	reader.DisallowUnknownFields() // a misspelt fail_mode would quietly be the default
	if err := reader.Decode(config); err != nil {
		if strings.Contains(err.Error(), "unknown field") {
			err = fmt.Errorf("%w: known are %s; in policy %s; in an upstream %s", err,
				fieldsOf(Config{}), fieldsOf(PolicyConfig{}), fieldsOf(Upstream{}))
		}
		return nil, err
	}
	return config, config.complete()
}

// fieldsOf lists the names of a part of the file.
func fieldsOf(part any) string {
	var names []string
	for _, field := range reflect.VisibleFields(reflect.TypeOf(part)) {
		if name := field.Tag.Get("json"); name != "" {
			names = append(names, name)
		}
	}
	return strings.Join(names, ", ")
}

func (c *Config) complete() error {
	var problems []error
	if c.FailMode != "open" && c.FailMode != "closed" {
		problems = append(problems, fmt.Errorf("fail_mode: %q is neither open nor closed", c.FailMode))
	}
	for name, ms := range c.times() {
		if ms <= 0 {
			problems = append(problems, fmt.Errorf("%s: %d is no time in milliseconds", name, ms))
		}
	}
	c.Policy.Key = expand(c.Policy.Key, &problems)
	if c.Policy.Key != "" && c.Policy.CAFile == "" && !isLocal(c.Policy.Address) {
		problems = append(problems, errors.New("policy: a key goes to another host with ca_file only"))
	}
	for name, upstream := range c.Upstreams {
		base, err := url.Parse(upstream.BaseURL)
		if err != nil || base.Host == "" || (base.Scheme != "http" && base.Scheme != "https") {
			problems = append(problems, fmt.Errorf("upstreams.%s: base_url %q is no URL of http or https", name, upstream.BaseURL))
			continue
		}
		base.Path = cmp.Or(base.Path, "/")
		upstream.base = base
		for header, value := range upstream.Headers {
			upstream.Headers[header] = expand(value, &problems)
		}
		c.Upstreams[name] = upstream
	}
	return errors.Join(problems...)
}

func (c *Config) times() map[string]int64 {
	return map[string]int64{
		"request_timeout_ms": c.RequestTimeoutMs, "first_byte_timeout_ms": c.FirstByteTimeoutMs, "idle_timeout_ms": c.IdleTimeoutMs,
		"drain_ms": c.DrainMs, "select_timeout_ms": c.Policy.SelectTimeoutMs, "report_timeout_ms": c.Policy.ReportTimeoutMs,
	}
}

func expand(text string, problems *[]error) string {
	return os.Expand(text, func(name string) string {
		value, found := os.LookupEnv(name)
		if !found {
			*problems = append(*problems, fmt.Errorf("the environment variable %s is not set", name))
		}
		return value
	})
}

// isLocal: a key that goes there in plain text stays on this host. A name that begins with 127 is no address.
func isLocal(address string) bool {
	for _, one := range strings.Split(strings.TrimPrefix(address, "ipv4:"), ",") {
		if strings.HasPrefix(one, "unix:") {
			continue
		}
		host, _, err := net.SplitHostPort(one)
		if ip := net.ParseIP(host); err != nil || (host != "localhost" && (ip == nil || !ip.IsLoopback())) {
			return false
		}
	}
	return true
}

func milliseconds(ms int64) time.Duration { return time.Duration(ms) * time.Millisecond }
