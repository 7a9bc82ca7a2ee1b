//! The server as clients see it: a real one on loopback, spoken to in HTTP.

use super::support::{LIMITS, Running, engine, families, model, write};
use ferrospeed_serve::server::ServerOptions;
use serde_json::{Value, json};

fn server() -> (tempfile::TempDir, Running) {
    let folder = model(&families()[0]);
    let running = Running::start(engine(&folder, 64, LIMITS), ServerOptions::default());
    (folder, running)
}

fn greedy(more: Value) -> Value {
    let mut body = json!({"prompt": "Once upon", "max_tokens": 12, "temperature": 0});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

#[test]
fn a_stream_says_what_the_whole_answer_says() {
    let (_folder, server) = server();
    let reply = server.post("/v1/completions", &greedy(json!({"model": "tiny"})));
    assert_eq!(reply.status, 200, "{reply:?}");
    let whole = reply.json();
    assert_eq!(whole["object"], "text_completion");
    assert_eq!(whole["choices"][0]["finish_reason"], "length");
    assert_eq!(whole["usage"], json!({"prompt_tokens": 9, "completion_tokens": 12, "total_tokens": 21}));
    let text = whole["choices"][0]["text"].as_str().unwrap();

    let body = greedy(json!({"stream": true, "stream_options": {"include_usage": true}}));
    let reply = server.post("/v1/completions", &body);
    assert!(reply.head.to_lowercase().contains("content-type: text/event-stream"), "{}", reply.head);
    let mut pieces = reply.pieces();
    let usage = pieces.pop().unwrap();
    assert_eq!((&usage["usage"], &usage["choices"]), (&whole["usage"], &json!([])));
    let joined: String = pieces.iter().map(|piece| piece["choices"][0]["text"].as_str().unwrap()).collect();
    assert_eq!(joined, text);
    let finishes: Vec<&Value> = pieces.iter().map(|piece| &piece["choices"][0]["finish_reason"]).collect();
    assert_eq!(*finishes.last().unwrap(), "length");
    assert!(finishes[..finishes.len() - 1].iter().all(|finish| finish.is_null()));
    assert!(pieces.len() > 2, "it came in pieces");
}

#[test]
fn a_chat_goes_through_the_models_template() {
    let folder = model(&families()[0]);
    let template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>";
    write(&folder, "tokenizer_config.json", &json!({"chat_template": template}).to_string());
    let server = Running::start(engine(&folder, 64, LIMITS), ServerOptions::default());
    let body = |messages: Value| json!({"messages": messages, "max_tokens": 8, "temperature": 0});
    let said = server.post("/v1/chat/completions", &body(json!([{"role": "user", "content": "hi"}]))).json();
    let plain = json!({"prompt": "<user>hi<assistant>", "max_tokens": 8, "temperature": 0});
    let expected = server.post("/v1/completions", &plain).json();
    assert_eq!(said["object"], "chat.completion");
    assert_eq!(said["choices"][0]["message"]["content"], expected["choices"][0]["text"]);
    assert_eq!(said["usage"], expected["usage"]);
    let parts =
        json!([{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]);
    let mut body = body(parts);
    body["stream"] = true.into();
    let pieces = server.post("/v1/chat/completions", &body).pieces();
    assert_eq!(pieces[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
    let deltas =
        pieces.iter().map(|piece| piece["choices"][0]["delta"]["content"].as_str().unwrap_or_default());
    assert_eq!(deltas.collect::<String>(), said["choices"][0]["message"]["content"]);
    assert_eq!(pieces[0]["object"], "chat.completion.chunk");
}

#[test]
fn several_answers_prompts_and_their_probabilities_come_in_order() {
    let (_folder, server) = server();
    let body = json!({"prompt": ["ab", [97, 98], "xyz"], "n": 2, "max_tokens": 5, "seed": 11, "logprobs": 3});
    let reply = server.post("/v1/completions", &body).json();
    let choices = reply["choices"].as_array().unwrap();
    assert_eq!(
        choices.iter().map(|choice| choice["index"].as_u64().unwrap()).collect::<Vec<_>>(),
        [0, 1, 2, 3, 4, 5]
    );
    assert_eq!(reply["usage"]["prompt_tokens"], 2 + 2 + 3);
    assert_eq!(reply, {
        let mut again = server.post("/v1/completions", &body).json();
        again["id"] = reply["id"].clone();
        again["created"] = reply["created"].clone();
        again
    });
    for choice in choices {
        let told = &choice["logprobs"];
        for key in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
            assert_eq!(told[key].as_array().unwrap().len(), 5, "{key} of {choice}");
        }
        assert!(told["token_logprobs"][0].as_f64().unwrap() <= 0.0);
    }
    let body = json!({"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "temperature": 0,
                      "logprobs": true, "top_logprobs": 4});
    let told = server.post("/v1/chat/completions", &body).json()["choices"][0]["logprobs"]["content"].clone();
    assert_eq!(told.as_array().unwrap().len(), 3);
    let first = &told[0];
    assert_eq!(first["top_logprobs"].as_array().unwrap().len(), 4);
    assert_eq!(first["top_logprobs"][0]["token"], first["token"], "greedy takes the likeliest");
    assert_eq!(first["top_logprobs"][0]["logprob"], first["logprob"]);
    // Of a stop string not even the likelihoods are told; of text that only begins like one, all are.
    for (stop, text) in [("AAA", ""), ("AAAB", "AAAAA")] {
        let body = json!({"prompt": "ab", "max_tokens": 5, "temperature": 0, "logit_bias": {"65": 100}, "stop": stop, "logprobs": 0});
        let choice = server.post("/v1/completions", &body).json()["choices"][0].clone();
        assert_eq!(choice["text"], text);
        assert_eq!(choice["logprobs"]["tokens"].as_array().unwrap().len(), text.len(), "{choice}");
        let offsets: Vec<usize> = (2..2 + text.len()).collect();
        let told = &choice["logprobs"]["text_offset"];
        assert!(*told == json!(offsets) || *told == json!((0..text.len()).collect::<Vec<_>>()), "{choice}");
    }
}

#[test]
fn answers_end_at_stop_strings_and_at_tokens_that_end_texts() {
    let folder = model(&families()[0]);
    let text = {
        let server = Running::start(engine(&folder, 64, LIMITS), ServerOptions::default());
        // Letters only, so that a stop string is one token for each letter.
        let bias: serde_json::Map<String, Value> = (97..123).map(|id| (id.to_string(), json!(100))).collect();
        let body = |more: Value| {
            greedy(json!({"logit_bias": bias}))
                .as_object()
                .unwrap()
                .clone()
                .into_iter()
                .chain(more.as_object().unwrap().clone())
                .collect::<serde_json::Map<_, _>>()
                .into()
        };
        let whole = server.post("/v1/completions", &body(json!({}))).json();
        let text = whole["choices"][0]["text"].as_str().unwrap().to_owned();
        assert_eq!(text.len(), 12, "{whole}");
        let stopped = server.post("/v1/completions", &body(json!({"stop": [&text[4..7]]}))).json();
        let place = text.find(&text[4..7]).unwrap();
        assert_eq!(stopped["choices"][0]["text"], text[..place]);
        assert_eq!(stopped["choices"][0]["finish_reason"], "stop");
        assert_eq!(stopped["usage"]["completion_tokens"].as_u64().unwrap() as usize, place + 3);
        let echoed = server.post("/v1/completions", &body(json!({"echo": true}))).json();
        assert_eq!(echoed["choices"][0]["text"], format!("Once upon{text}"));
        text
    };
    // The first letter becomes the token that ends texts.
    let end = json!({"eos_token_id": text.as_bytes()[0]});
    write(&folder, "generation_config.json", &end.to_string());
    let server = Running::start(engine(&folder, 64, LIMITS), ServerOptions::default());
    let bias: serde_json::Map<String, Value> = (97..123).map(|id| (id.to_string(), json!(100))).collect();
    let ended = server.post("/v1/completions", &greedy(json!({"logit_bias": bias}))).json();
    assert_eq!(
        (&ended["choices"][0]["text"], &ended["choices"][0]["finish_reason"]),
        (&json!(""), &json!("stop"))
    );
    assert_eq!(ended["usage"]["completion_tokens"], 1);
    let ignored =
        server.post("/v1/completions", &greedy(json!({"logit_bias": bias, "ignore_eos": true}))).json();
    assert_eq!(ignored["choices"][0]["text"], text);
}

#[test]
fn embeddings_have_length_one_and_do_not_depend_on_company() {
    let (_folder, server) = server();
    let long = "a long text that fills more than a block of the cache";
    let together =
        server.post("/v1/embeddings", &json!({"input": [long, "b", long], "model": "tiny"})).json();
    let vector = |reply: &Value, index: usize| -> Vec<f64> {
        let values = reply["data"][index]["embedding"].as_array().unwrap();
        values.iter().map(|value| value.as_f64().unwrap()).collect()
    };
    let first = vector(&together, 0);
    assert_eq!(first.len(), 32);
    assert!((first.iter().map(|value| value * value).sum::<f64>() - 1.0).abs() < 1e-5);
    assert_eq!(first, vector(&together, 2));
    assert_ne!(first, vector(&together, 1));
    assert_eq!(
        first,
        vector(&server.post("/v1/embeddings", &json!({"input": long})).json(), 0),
        "found in the cache"
    );
    let packed = server.post("/v1/embeddings", &json!({"input": "b", "encoding_format": "base64"})).json();
    assert_eq!(packed["data"][0]["embedding"].as_str().unwrap().len(), (32usize * 4).div_ceil(3) * 4);
    for (input, length) in [("x".repeat(5000), "has 5000 tokens"), ("x".repeat(500_000), "has 500000 bytes")]
    {
        let error = server.post("/v1/embeddings", &json!({"input": input})).json()["error"].clone();
        let message = error["message"].as_str().unwrap();
        assert!(message.starts_with("input: ") && message.contains(length), "{message}");
        assert!(message.contains("1024 are the most") || message.contains("4096 tokens can be"), "{message}");
        assert_eq!(error["code"], "context_length_exceeded");
    }
    server.wait_for("cache_blocks_held", 0);
}

#[test]
fn operators_see_the_model_its_health_and_its_numbers() {
    let (_folder, server) = server();
    let models = server.get("/v1/models").json();
    assert_eq!((&models["object"], &models["data"][0]["id"]), (&json!("list"), &json!("tiny")));
    assert_eq!(server.get("/v1/models/tiny").json()["object"], "model");
    assert_eq!(server.get("/v1/models/other").status, 404);
    assert_eq!(server.get("/health").json(), json!({"status": "ok"}));
    server.post("/v1/completions", &greedy(json!({})));
    server.wait_for("requests_finished_total", 1);
    assert_eq!(server.metric("generated_tokens_total"), 12);
    assert_eq!(server.metric("time_to_first_token_seconds_count"), 1);
    assert_eq!(server.metric("time_between_tokens_seconds_count"), 11);
}

#[test]
fn the_chat_page_brings_all_it_needs_and_may_talk_to_nobody_else() {
    let (_folder, server) = server();
    for (path, kind) in [("/", "text/html"), ("/chat.js", "text/javascript"), ("/chat.css", "text/css")] {
        let reply = server.get(path);
        let head = reply.head.to_lowercase();
        assert!(reply.status == 200 && head.contains(&format!("content-type: {kind}")), "{path}: {head}");
        let policy = head.lines().find_map(|line| line.strip_prefix("content-security-policy: ")).unwrap();
        assert!(policy.contains("default-src 'none'") && !policy.contains("unsafe"), "{policy}");
        assert!(
            !reply.body.contains("http://") && !reply.body.contains("https://"),
            "{path} names another host"
        );
    }
    let page = server.get("/").body;
    assert!(
        !page.contains("<style") && !page.contains("onclick"),
        "nothing inline, which the policy forbids"
    );
}

/// What lm-evaluation-harness asks of `local-completions`: the likelihood of a continuation, and whether it is the likeliest.
#[test]
fn a_prompt_is_told_with_how_likely_its_tokens_are() {
    let (_folder, server) = server();
    let (context, text) = ("to be", "to be or not");
    let tokens: Vec<u8> = text.bytes().collect();
    let body = |more: Value| {
        let mut body =
            json!({"prompt": [tokens, "to be or not"], "temperature": 0, "logprobs": 1, "echo": true});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        server.post("/v1/completions", &body).json()
    };
    let with_one = body(json!({"max_tokens": 1}));
    let alone = body(json!({"max_tokens": 0}));
    assert_eq!(alone["usage"], json!({"prompt_tokens": 24, "completion_tokens": 0, "total_tokens": 24}));
    for reply in [&with_one, &alone] {
        let new = usize::from(std::ptr::eq(reply, &with_one));
        for choice in reply["choices"].as_array().unwrap() {
            assert_eq!(choice["finish_reason"], "length");
            assert!(choice["text"].as_str().unwrap().starts_with(text), "{choice}");
            let told = &choice["logprobs"];
            for key in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
                assert_eq!(told[key].as_array().unwrap().len(), text.len() + new, "{key}");
            }
            assert!(told["token_logprobs"][0].is_null() && told["top_logprobs"][0].is_null());
            assert_eq!(told["tokens"][6], "o");
            assert_eq!(told["text_offset"][6], 6);
            for at in 1..text.len() {
                let own = told["token_logprobs"][at].as_f64().unwrap();
                let best =
                    told["top_logprobs"][at].as_object().unwrap().values().next().unwrap().as_f64().unwrap();
                assert!(own <= best && best <= 0.0, "{at}: {own} {best}");
            }
        }
        // Whoever asks beside it, and whatever is written behind it.
        assert_eq!(
            reply["choices"][0]["logprobs"]["token_logprobs"][5],
            alone["choices"][1]["logprobs"]["token_logprobs"][5]
        );
    }
    let sum = |reply: &Value| -> f64 {
        let told = reply["choices"][0]["logprobs"]["token_logprobs"].as_array().unwrap().clone();
        told[context.len()..text.len()].iter().map(|logprob| logprob.as_f64().unwrap()).sum()
    };
    assert_eq!(sum(&with_one), sum(&alone));
    // Several answers to a prompt begin with the same.
    let twice = server
        .post(
            "/v1/completions",
            &json!({"prompt": "ab", "n": 2, "max_tokens": 2, "logprobs": 0, "echo": true}),
        )
        .json();
    let first = |at: usize| twice["choices"][at]["logprobs"]["token_logprobs"][1].clone();
    assert!(first(0).is_number() && first(0) == first(1), "{twice}");
}
