package main

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"time"
)

func isEventStream(headers http.Header) bool {
	return strings.HasPrefix(headers.Get("Content-Type"), "text/event-stream")
}

// eventScanner looks for error events in server-sent events, chunk by chunk.
type eventScanner struct {
	line    []byte
	seen    int    // data lines so far
	failure []byte // the first error event
}

func (s *eventScanner) Write(chunk []byte) {
	for len(chunk) > 0 {
		part, rest, isWhole := bytes.Cut(chunk, []byte("\n"))
		if len(s.line)+len(part) <= maxHeadBytes {
			s.line = append(s.line, part...)
		}
		if !isWhole {
			return
		}
		s.judge(bytes.TrimSpace(s.line))
		s.line, chunk = s.line[:0], rest
	}
}

func (s *eventScanner) judge(line []byte) {
	data, found := bytes.CutPrefix(line, []byte("data:"))
	if !found {
		return
	}
	s.seen++
	if s.failure == nil && isError(data) {
		s.failure = bytes.Clone(bytes.TrimSpace(data))
	}
}

// isError: the JSON is an error object of OpenAI, Anthropic or Gemini.
func isError(data []byte) bool {
	if !bytes.Contains(data, []byte("error")) && !bytes.Contains(data, []byte("failed")) {
		return false // most events end here, unparsed
	}
	var event struct {
		Type  string          `json:"type"`
		Error json.RawMessage `json:"error"`
	}
	if json.Unmarshal(data, &event) != nil {
		return false
	}
	hasError := len(event.Error) > 0 && string(event.Error) != "null"
	return hasError || event.Type == "error" || event.Type == "response.failed"
}

// hidesFailure: a whole 2xx answer that is none: empty, without an event, a web page, or an error object.
func hidesFailure(body []byte, isStream bool) bool {
	text := bytes.TrimSpace(body)
	if isStream {
		return !bytes.Contains(text, []byte("data:"))
	}
	return len(text) == 0 || text[0] == '<' || isError(text)
}

// watchedBody passes the body of a success on, watches for error events and silence, and says once how it ended.
type watchedBody struct {
	source io.Reader
	result *result
	client context.Context
	events eventScanner
	idle   time.Duration
	timer  *time.Timer // runs while the upstream is waited for, not while the client is
	finish func(*result)
}

func newWatchedBody(client context.Context, r *result, idle time.Duration, finish func(*result)) *watchedBody {
	timer := time.AfterFunc(idle, func() { r.cancel(errIdle) })
	timer.Stop()
	source := io.MultiReader(bytes.NewReader(r.head), r.body)
	return &watchedBody{source: source, result: r, client: client, idle: idle, timer: timer, finish: finish}
}

func (b *watchedBody) Read(buffer []byte) (n int, err error) {
	defer func() {
		b.timer.Stop()
		if failed := recover(); failed != nil {
			b.end(context.Canceled) // else its permits would be renewed for ever
			panic(failed)
		}
	}()
	b.timer.Reset(b.idle)
	n, err = b.source.Read(buffer)
	b.timer.Stop()
	b.result.bytes += int64(n)
	if b.result.isStream {
		b.events.Write(buffer[:n])
	}
	if err != nil {
		b.end(err)
	}
	return n, err
}

// Close comes last, and early where the client has left.
func (b *watchedBody) Close() error {
	b.end(context.Canceled)
	return nil
}

func (b *watchedBody) end(err error) {
	if b.finish == nil {
		return
	}
	finish, r := b.finish, b.result
	b.finish = nil
	r.took = time.Since(r.sent)
	r.streamError = b.events.failure
	switch {
	case err == io.EOF:
	case b.client.Err() != nil || (err == context.Canceled && context.Cause(r.ctx) != errIdle):
		r.cancelled = true
	default:
		r.fail(err)
	}
	r.close()
	finish(r)
}
