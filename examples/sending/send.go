// Sends one event with Go's standard library.
//
//	URL=http://127.0.0.1:8000 SOURCE=demo SECRET=demo-secret go run send.go order-1
package main

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"os"
	"strconv"
	"time"
)

var client = &http.Client{Timeout: 10 * time.Second}

// send posts an event. What does not tell a decision is tried again: the event has an id.
func send(event map[string]any) (int, []byte, error) {
	body, err := json.Marshal(event)
	if err != nil {
		return 0, nil, err
	}
	wait := 200 * time.Millisecond
	for range 6 {
		status, asked, answer, err := try(body)
		if err == nil && status < 500 && status != 408 && status != 429 {
			return status, answer, nil
		}
		if err != nil {
			log.Printf("no answer: %v", err)
		}
		time.Sleep(max(wait, asked))
		wait *= 2
	}
	return 0, nil, errors.New("not confirmed; send it again later, with the same event_id")
}

// try posts once: status, what Retry-After asks for, and body of the answer. Each try is signed anew: a timestamp is good
// for five minutes.
func try(body []byte) (int, time.Duration, []byte, error) {
	request, err := http.NewRequest("POST", os.Getenv("URL")+"/v1/events", bytes.NewReader(body))
	if err != nil {
		return 0, 0, nil, err
	}
	now := strconv.FormatInt(time.Now().Unix(), 10)
	mac := hmac.New(sha256.New, []byte(os.Getenv("SECRET")))
	mac.Write([]byte(now + "\n"))
	mac.Write(body)
	request.Header.Set("Content-Type", "application/json")
	request.Header.Set("X-Madeira-Source", os.Getenv("SOURCE"))
	request.Header.Set("X-Madeira-Timestamp", now)
	request.Header.Set("X-Madeira-Signature", hex.EncodeToString(mac.Sum(nil)))
	answer, err := client.Do(request)
	if err != nil {
		return 0, 0, nil, err
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	seconds, _ := strconv.Atoi(answer.Header.Get("Retry-After"))
	return answer.StatusCode, time.Duration(seconds) * time.Second, text, err
}

func main() {
	status, answer, err := send(map[string]any{
		"event_id": os.Args[1], "event_type": "order.created", "payload": map[string]any{"total": 42},
	})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(status, string(answer))
	if status != 200 && status != 202 {
		os.Exit(1)
	}
}
