//! Clients that vanish, send garbage, come too many at once or too slowly: they get a 4xx, and others do not notice.

use super::support;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use super::support::{
    Exchange, LIMITS, PATIENCE, Reply, Running, engine, exchange, families, head, model, write,
};
use ferrospeed_serve::core::schedule::Limits;
use ferrospeed_serve::server::ServerOptions;
use ferrospeed_testkit::property::Random;
use serde_json::{Value, json};

fn start(limits: Limits, options: ServerOptions) -> (tempfile::TempDir, Running) {
    let folder = model(&families()[0]);
    let running = Running::start(engine(&folder, 300, limits), options);
    (folder, running)
}

/// A stream of thousands of tokens, of which one has arrived.
fn long_stream(server: &Running) -> Exchange {
    let body = json!({"prompt": "x", "max_tokens": 4000, "temperature": 0, "stream": true, "logprobs": 0});
    let mut stream = server.post_stream("/v1/completions", &body);
    stream.read_until("data: ");
    stream
}

fn assert_answers(server: &Running) {
    let reply = server.post("/v1/completions", &json!({"prompt": "x", "max_tokens": 2}));
    assert_eq!(reply.status, 200, "{reply:?}");
}

fn assert_fault(reply: &Reply, status: u16, what: &str) {
    assert_eq!(reply.status, status, "{what}: {reply:?}");
    let error = &reply.json()["error"];
    assert!(error["message"].is_string() && error["type"].is_string(), "{what}: {reply:?}");
    for key in ["param", "code"] {
        assert!(error.get(key).is_some(), "{what}: {reply:?}");
    }
}

#[test]
fn a_client_that_vanishes_in_mid_stream_takes_its_request_along() {
    let (_folder, server) = start(LIMITS, ServerOptions::default());
    let streams: Vec<Exchange> = (0..3).map(|_| long_stream(&server)).collect();
    assert!(server.metric("cache_blocks_held") > 0);
    drop(streams);
    server.wait_for("requests_cancelled_total", 3);
    server.wait_for("cache_blocks_held", 0);
    // One that does not stream is noticed too, while it waits for its whole answer.
    let body = json!({"prompt": "x", "max_tokens": 4000, "temperature": 0});
    let waiting = server.post_stream("/v1/completions", &body);
    server.wait_for("sequences_running", 1);
    drop(waiting);
    server.wait_for("requests_cancelled_total", 4);
    assert_answers(&server);
}

#[test]
fn more_requests_than_can_wait_are_sent_away() {
    let (_folder, server) = start(Limits { running: 1, waiting: 1, ..LIMITS }, ServerOptions::default());
    let first = long_stream(&server);
    let second = server.post_stream("/v1/completions", &json!({"prompt": "x", "max_tokens": 3}));
    server.wait_for("sequences_waiting", 1);
    let refused = server.post("/v1/completions", &json!({"prompt": "x", "max_tokens": 3}));
    assert_fault(&refused, 429, "the third");
    assert!(refused.head.to_lowercase().contains("retry-after: "), "{}", refused.head);
    assert_eq!(refused.json()["error"]["code"], "queue_full");
    drop(first);
    assert_eq!(second.read_all().status, 200, "the second gets its turn");
}

#[test]
fn requests_that_make_no_sense_are_refused_by_name() {
    let (_folder, server) = start(LIMITS, ServerOptions::default());
    let cases: Vec<(Value, &str)> = vec![
        (json!([]), ""),
        (json!("x"), ""),
        (json!({}), "prompt"),
        (json!({"prompt": ""}), ""),
        (json!({"prompt": []}), "prompt"),
        (json!({"prompt": [1, "x"]}), "prompt"),
        (json!({"prompt": [256]}), "prompt"),
        (json!({"prompt": [-1]}), "prompt"),
        (json!({"prompt": vec!["x"; 100]}), "prompt"),
        (json!({"prompt": "x", "max_tokens": 0}), "max_tokens"),
        (json!({"prompt": "x", "max_tokens": 1.5}), "max_tokens"),
        (json!({"prompt": "x", "max_tokens": 1u64 << 60}), "max_tokens"),
        (json!({"prompt": "x", "temperature": -1}), "temperature"),
        (json!({"prompt": "x", "temperature": "hot"}), "temperature"),
        (json!({"prompt": "x", "top_p": 1.1}), "top_p"),
        (json!({"prompt": "x", "min_p": -0.1}), "min_p"),
        (json!({"prompt": "x", "top_k": -2}), "top_k"),
        (json!({"prompt": "x", "n": 0}), "n"),
        (json!({"prompt": "x", "n": 1000}), "n"),
        (json!({"prompt": "x", "best_of": 3}), "best_of"),
        (json!({"prompt": "x", "presence_penalty": 3}), "presence_penalty"),
        (json!({"prompt": "x", "repetition_penalty": 0}), "repetition_penalty"),
        (json!({"prompt": "x", "logit_bias": [1]}), "logit_bias"),
        (json!({"prompt": "x", "logit_bias": {"300": 1}}), "logit_bias"),
        (json!({"prompt": "x", "logit_bias": {"1": 101}}), "logit_bias"),
        (json!({"prompt": "x", "logprobs": 21}), "logprobs"),
        (json!({"prompt": "x", "logprobs": 1, "echo": true, "stream": true}), "stream"),
        (json!({"prompt": "x", "stop": 7}), "stop"),
        (json!({"prompt": "x", "stop": vec!["a"; 17]}), "stop"),
        (json!({"prompt": "x", "stop": [""]}), "stop"),
        (json!({"prompt": "x", "stream": "yes"}), "stream"),
        (json!({"prompt": "x", "stream_options": {}}), "stream_options"),
        (json!({"prompt": "x", "suffix": "y"}), "suffix"),
        (json!({"prompt": "x", "tempreature": 1}), "tempreature"),
        (json!({"prompt": "x".repeat(5000)}), ""),
    ];
    for (body, param) in cases {
        let reply = server.post("/v1/completions", &body);
        assert_fault(&reply, 400, &body.to_string().chars().take(80).collect::<String>());
        assert_eq!(reply.json()["error"]["param"].as_str().unwrap_or_default(), param, "{body}");
    }
    let message = |message: Value| json!({"messages": [message], "max_tokens": 1});
    for (body, param) in [
        (json!({"messages": []}), "messages"),
        (message(json!("x")), "messages[0]"),
        (message(json!({"content": "x"})), "messages[0].role"),
        (message(json!({"role": "user"})), "messages[0].content"),
        (message(json!({"role": "user", "content": [{"type": "image_url"}]})), "messages[0].content"),
        (message(json!({"role": "assistant", "tool_calls": [{}]})), "messages[0].tool_calls"),
        (json!({"messages": [{"role": "user", "content": "x"}], "tools": [{}]}), "tools[0]"),
        (json!({"messages": [{"role": "user", "content": "x"}], "top_logprobs": 2}), "top_logprobs"),
        (
            json!({"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "xml"}}),
            "response_format",
        ),
    ] {
        let reply = server.post("/v1/chat/completions", &body);
        assert_fault(&reply, 400, &body.to_string());
        assert_eq!(reply.json()["error"]["param"], param, "{body}");
    }
    assert_fault(
        &server.post("/v1/completions", &json!({"prompt": "x", "model": "gpt-9"})),
        404,
        "another model",
    );
    assert_fault(&server.get("/v1/completions"), 405, "another method");
    assert_fault(&server.get("/v2/nothing"), 404, "another path");
    let long = server.post("/v1/completions", &json!({"prompt": "x".repeat(5000)}));
    assert_eq!(long.json()["error"]["code"], "context_length_exceeded");
    assert_answers(&server);
}

#[test]
fn a_field_that_stands_twice_is_refused_and_a_whole_number_may_be_written_with_a_point() {
    let (_folder, server) = start(LIMITS, ServerOptions::default());
    let sent = |body: &str| {
        exchange(server.address, &head("/v1/completions", "Host: localhost\r\n", body.len()), body.as_bytes())
    };
    let twice = sent(r#"{"prompt": "x", "max_tokens": 2, "prompt": "y"}"#).read_all();
    assert_fault(&twice, 400, "twice");
    assert!(twice.body.contains(r#"the key \"prompt\" stands twice"#), "{twice:?}");
    let whole = sent(r#"{"prompt": "x", "max_tokens": 2.0, "n": 1.0}"#).read_all();
    assert_eq!(whole.status, 200, "{whole:?}");
    assert_eq!(whole.json()["usage"]["completion_tokens"], 2);
}

#[test]
fn connections_that_ask_nothing_make_room_for_those_that_do() {
    let body = head("/v1/completions", "Host: localhost\r\n", 100) + "{";
    for half in ["GET /health HTTP/1.1\r\nHost: loc", &body] {
        let options = ServerOptions { max_connections: 4, ..ServerOptions::default() };
        let (_folder, server) = start(LIMITS, options);
        let hold = || {
            let mut stream = TcpStream::connect(server.address).unwrap();
            stream.write_all(half.as_bytes()).unwrap();
            stream.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
            stream
        };
        let mut held = [hold(), hold(), hold(), hold()];
        assert_eq!(server.get("/health").status, 200);
        // One gave way, without a word; the others may still finish what they began.
        let gave_way = held.iter_mut().filter_map(|stream| match stream.read(&mut [0; 16]) {
            Ok(bytes) => Some(bytes),
            Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => Some(0),
            Err(_) => None,
        });
        assert_eq!(gave_way.collect::<Vec<_>>(), [0], "{half}");
    }
}

#[test]
fn unfinished_bodies_hold_no_more_memory_together_than_a_few_dozen_whole_ones() {
    let options = ServerOptions { max_body_bytes: 1000, ..ServerOptions::default() };
    let (_folder, server) = start(LIMITS, options);
    let unfinished = head("/v1/completions", "Host: localhost\r\n", 1000) + &" ".repeat(900);
    let mut held: Vec<TcpStream> = (0..100)
        .map(|_| {
            let mut stream = TcpStream::connect(server.address).unwrap();
            stream.write_all(unfinished.as_bytes()).unwrap();
            stream
        })
        .collect();
    // 64 bodies of 1000 bytes are 71 of 900.
    let patience = Instant::now() + Duration::from_secs(20);
    let mut closed = 0;
    while closed < 29 {
        assert!(Instant::now() < patience, "{closed} of 100 gave way");
        held.retain_mut(|stream| {
            stream.set_read_timeout(Some(Duration::from_millis(5))).unwrap();
            let gone = match stream.read(&mut [0; 16]) {
                Ok(bytes) => bytes == 0,
                Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
            };
            closed += usize::from(gone);
            !gone
        });
    }
    let whole = server.post("/v1/completions", &json!({"prompt": "x", "max_tokens": 2}));
    assert_eq!(whole.status, 200, "{whole:?}");
    // One that was on its way all the time still comes in.
    let mut last = held.pop().unwrap();
    last.write_all(format!("{:>100}", r#"{"prompt": "x", "max_tokens": 2}"#).as_bytes()).unwrap();
    last.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let mut first = [0; 12];
    last.read_exact(&mut first).unwrap();
    assert!(first.ends_with(b" 200"), "{first:?}");
}

#[test]
fn text_of_tokens_that_the_model_does_not_know_is_refused_with_the_reason() {
    let folder = model(&families()[0]);
    let words = json!({"type": "WordLevel", "vocab": {"x": 5000, "y": 1}, "unk_token": "y"});
    write(&folder, "tokenizer.json", &json!({"version": "1.0", "model": words}).to_string());
    write(&folder, "chat_template.jinja", "{{ messages[0].content }}");
    let server = Running::start(engine(&folder, 300, LIMITS), ServerOptions::default());
    let chat = |text: &str| json!({"messages": [{"role": "user", "content": text}], "max_tokens": 2});
    let prompt = |text: &str| json!({"prompt": text, "max_tokens": 2});
    let input = |text: &str| json!({"input": text});
    for (path, good, bad) in [
        ("/v1/completions", prompt("y"), prompt("x")),
        ("/v1/chat/completions", chat("y"), chat("x")),
        ("/v1/embeddings", input("y"), input("x")),
    ] {
        let refused = server.post(path, &bad);
        assert_fault(&refused, 400, path);
        let why = refused.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(why.contains("the token 5000 of it, and the model knows 256 tokens"), "{path}: {why}");
        assert_eq!(server.post(path, &good).status, 200, "{path}");
    }
}

#[test]
fn bodies_that_are_no_json_too_large_or_of_another_kind_are_refused() {
    let (_folder, server) = start(LIMITS, ServerOptions { max_body_bytes: 1000, ..Default::default() });
    let send = |headers: &str, body: &[u8]| {
        let length = body.len();
        let head = format!("POST /v1/completions HTTP/1.0\r\n{headers}Content-Length: {length}\r\n\r\n");
        exchange(server.address, &head, body).read_all()
    };
    const JSON: &str = "Host: localhost\r\nContent-Type: application/json\r\n";
    assert_fault(&send(JSON, b"{"), 400, "half of it");
    assert_fault(&send(JSON, &[0xff; 9]), 400, "no text");
    assert_fault(&send(JSON, "[".repeat(900).as_bytes()), 400, "too deep");
    assert_fault(&send(JSON, &[b' '; 1001]), 413, "too large");
    // One that says so is refused before any of it has come.
    let head = format!("POST /v1/completions HTTP/1.0\r\n{JSON}Content-Length: 1000000000000\r\n\r\n");
    assert_fault(&exchange(server.address, &head, b"").read_all(), 413, "far too large");
    assert_fault(
        &send("Host: localhost\r\nContent-Type: text/plain\r\n", b"{\"prompt\": \"x\"}"),
        415,
        "a form's kind",
    );
    assert_fault(
        &send("Host: evil.example\r\nContent-Type: application/json\r\n", b"{}"),
        403,
        "another name",
    );
    assert_fault(&send("Content-Type: application/json\r\n", b"{}"), 403, "no name");
    assert_fault(
        &send("Host: localhost\r\nHost: evil.example\r\nContent-Type: application/json\r\n", b"{}"),
        400,
        "two names",
    );
    assert_answers(&server);
}

#[test]
fn what_is_no_request_gets_the_body_that_all_errors_have() {
    let (_folder, server) = start(LIMITS, ServerOptions::default());
    let many: String = (0..200).map(|number| format!("x-{number}: 1\r\n")).collect();
    // A little more than 64 KiB.
    let large: String = (0..7).map(|number| format!("x-{number}: {}\r\n", "x".repeat(9_360))).collect();
    for (sent, status) in [
        ("GET / HTTP/9.9\r\n\r\n", 400),
        ("GET /\r\n\r\n", 400),
        ("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        ("GET /v1/models/%ff%00 HTTP/1.0\r\nHost: localhost\r\n\r\n", 400),
        ("\u{7f}\u{7f}\r\n\r\n", 400),
        ("POST / HTTP/1.1\r\nContent-Length: -4\r\n\r\n", 400),
        ("POST / HTTP/1.1\r\nContent-Length: 4\r\nContent-Length: 5\r\n\r\n", 400),
        ("POST / HTTP/1.1\r\nno header\r\n\r\n", 400),
        (&format!("GET / HTTP/1.1\r\n{many}\r\n"), 431),
        (&format!("GET / HTTP/1.1\r\nConnection: close\r\nHost: localhost\r\n{large}\r\n"), 431),
    ] {
        let reply = exchange(server.address, sent, b"").read_all();
        let what: String = sent.chars().take(60).collect();
        assert_fault(&reply, status, &what);
        let length = format!("content-length: {}", reply.body.len());
        assert!(reply.head.contains(&length) && reply.head.contains("application/json"), "{reply:?}");
    }
    assert_answers(&server);
}

#[test]
fn a_request_with_two_ends_is_refused_and_nothing_behind_it_is_answered() {
    let (_folder, server) = start(LIMITS, ServerOptions::default());
    let (length, encoding) = ("Content-Length: 6", "transfer-encoding: chunked");
    for headers in [[length, encoding], [encoding, length]] {
        let request = format!(
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{}\r\n\r\n0\r\n\r\n",
            headers.join("\r\n")
        );
        let smuggled = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n";
        let reply = exchange(server.address, &request, smuggled).read_all();
        assert_fault(&reply, 400, "both");
        assert_eq!(reply.json()["error"]["code"], "ambiguous_length", "{reply:?}");
        assert!(reply.head.to_lowercase().contains("connection: close"), "{reply:?}");
    }
    // Either alone is well.
    let body = json!({"prompt": "x", "max_tokens": 2}).to_string();
    let chunked = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n{encoding}\r\n\r\n{:x}\r\n{body}\r\n0\r\n\r\n",
        body.len()
    );
    assert_eq!(exchange(server.address, &chunked, b"").read_all().status, 200);
    assert_answers(&server);
}

#[test]
fn garbage_on_the_wire_stalls_nobody() {
    let (_folder, server) = start(LIMITS, ServerOptions::default());
    let mut idle: Vec<TcpStream> = Vec::new();
    for seed in 0..60 {
        let mut random = Random(seed);
        let body = json!({"prompt": "x", "max_tokens": 2}).to_string();
        let mut bytes =
            [head("/v1/completions", "Host: localhost\r\n", body.len()).as_bytes(), body.as_bytes()].concat();
        random.damage(&mut bytes);
        let mut stream = TcpStream::connect(server.address).unwrap();
        let _ = stream.write_all(&bytes);
        // Some hang up, some stay and say nothing more.
        if seed % 2 == 0 {
            idle.push(stream);
        }
    }
    assert_answers(&server);
    drop(idle);
    server.wait_for("cache_blocks_held", 0);
}

#[test]
fn only_who_has_a_key_may_ask() {
    let keys = vec!["first".to_owned(), "second".to_owned()];
    let (_folder, server) = start(LIMITS, ServerOptions { api_keys: keys, ..Default::default() });
    let ask = |key: &str| {
        let body = json!({"prompt": "x", "max_tokens": 1}).to_string();
        let headers = format!("Host: some.name\r\n{key}");
        exchange(server.address, &head("/v1/completions", &headers, body.len()), body.as_bytes()).read_all()
    };
    for key in
        ["", "Authorization: Bearer third\r\n", "Authorization: Bearer \r\n", "Authorization: first\r\n"]
    {
        let reply = ask(key);
        assert_fault(&reply, 401, key);
        assert_eq!(reply.json()["error"]["code"], "invalid_api_key");
    }
    assert_eq!(ask("Authorization: Bearer second\r\n").status, 200);
    assert_eq!(
        ask("Authorization: bearer second\r\n").status,
        200,
        "names of schemes have no case (RFC 9110, 11.1)"
    );
    assert_eq!((server.get("/metrics").status, server.get("/health").status), (401, 200));
}

#[test]
fn a_request_has_its_time_and_no_more() {
    let options = ServerOptions { request_time: Duration::from_millis(300), ..Default::default() };
    let (_folder, server) = start(LIMITS, options);
    let reply = server.post("/v1/completions", &json!({"prompt": "x", "max_tokens": 4000, "n": 16}));
    assert_fault(&reply, 504, "sixteen long answers");
    server.wait_for("cache_blocks_held", 0);
    assert_answers(&server);
}

#[test]
fn a_server_that_is_told_to_stop_lets_requests_finish_or_cuts_them_off() {
    let (_folder, mut server) = start(LIMITS, ServerOptions { grace: PATIENCE, ..Default::default() });
    let body = json!({"prompt": "x", "max_tokens": 200, "temperature": 0, "stream": true});
    let mut short = server.post_stream("/v1/completions", &body);
    short.read_until("data: ");
    server.ask_to_stop();
    assert!(short.read_all_rest().contains("data: [DONE]"), "it was given the time");

    let (_folder, mut server) =
        start(LIMITS, ServerOptions { grace: Duration::from_millis(50), ..Default::default() });
    let mut long: Vec<Exchange> = (0..8).map(|_| long_stream(&server)).collect();
    let begun = Instant::now();
    server.ask_to_stop();
    let rest = long.remove(0).read_all_rest();
    assert!(rest.contains("the server is shutting down") && !rest.contains("[DONE]"), "{rest}");
    support::wait("the server's end", || server.is_over());
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
}

trait Rest {
    fn read_all_rest(self) -> String;
}

impl Rest for Exchange {
    fn read_all_rest(mut self) -> String {
        let mut rest = String::new();
        self.reader().read_to_string(&mut rest).unwrap();
        rest
    }
}
