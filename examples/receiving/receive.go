// Receives Madeira's calls with Go's standard library.
//
//	PORT=8901 SECRETS="the-new-secret the-old-secret" go run receive.go
package main

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"
)

// known holds the deliveries that were taken in; in real life a table with a unique key.
var known sync.Map

// keys decodes the secrets: whsec_… is the base64 of the key; any other secret is the key itself.
func keys(secrets string) (found [][]byte) {
	for _, secret := range strings.Fields(secrets) {
		encoded, standard := strings.CutPrefix(secret, "whsec_")
		if !standard {
			found = append(found, []byte(secret))
			continue
		}
		key, err := base64.RawStdEncoding.DecodeString(strings.TrimRight(encoded, "="))
		if err != nil {
			log.Fatal("a secret that begins with whsec_ must go on in base64")
		}
		found = append(found, key)
	}
	return found
}

// genuine tells whether Madeira made this call, by Standard Webhooks.
func genuine(keys [][]byte, header http.Header, body []byte) bool {
	id, timestamp := header.Get("webhook-id"), header.Get("webhook-timestamp")
	// A test call is signed too, and brings what somebody chose who may make one.
	if strings.HasPrefix(id, "msg_test_") {
		return false
	}
	at, err := strconv.ParseInt(timestamp, 10, 64)
	if id == "" || err != nil || time.Since(time.Unix(at, 0)).Abs() > 5*time.Minute {
		return false
	}
	offered := strings.Fields(header.Get("webhook-signature"))
	for _, key := range keys {
		mac := hmac.New(sha256.New, key)
		mac.Write([]byte(id + "." + timestamp + "."))
		mac.Write(body)
		expected := "v1," + base64.StdEncoding.EncodeToString(mac.Sum(nil))
		for _, signature := range offered {
			if hmac.Equal([]byte(signature), []byte(expected)) {
				return true
			}
		}
	}
	return false
}

func main() {
	secrets := keys(os.Getenv("SECRETS"))
	http.HandleFunc("POST /", func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, 16<<20))
		if err != nil || !genuine(secrets, r.Header, body) {
			fmt.Println("refused")
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		var event struct {
			EventType string `json:"event_type"`
			EventID   string `json:"event_id"`
		}
		if err := json.Unmarshal(body, &event); err != nil {
			w.WriteHeader(http.StatusInternalServerError)
			return
		}
		if _, before := known.LoadOrStore(r.Header.Get("webhook-id"), true); !before {
			fmt.Println(event.EventType, event.EventID)
		}
		w.WriteHeader(http.StatusNoContent)
	})
	listener, err := net.Listen("tcp", "127.0.0.1:"+os.Getenv("PORT"))
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("listening on port %d\n", listener.Addr().(*net.TCPAddr).Port)
	log.Fatal(http.Serve(listener, nil))
}
