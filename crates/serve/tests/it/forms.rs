//! Answers that keep to a form, and calls of tools, as clients get them from a model that has learnt nothing: what is right about
//! them is the form's doing.

use super::support::{LIMITS, Running, engine, families, model, write};
use ferrospeed_serve::constrain::{Form, Forms};
use ferrospeed_serve::sampling::{SamplingOptions, choose};
use ferrospeed_serve::server::ServerOptions;
use ferrospeed_text::Codec;
use serde_json::{Value, json};

const HERMES: &str = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}\
    {% for c in m.tool_calls %}<tool_call>{{ c.function.arguments.city }}</tool_call>{% endfor %}{% endfor %}\
    {% if add_generation_prompt %}<assistant>{% if enable_thinking %}<think>{% else %}{% endif %}{% endif %}{# </think> #}";

fn server(template: Option<&str>) -> (tempfile::TempDir, Running) {
    let folder = model(&families()[0]);
    if let Some(template) = template {
        write(&folder, "tokenizer_config.json", &json!({"chat_template": template}).to_string());
    }
    let running = Running::start(engine(&folder, 64, LIMITS), ServerOptions::default());
    (folder, running)
}

fn chat(more: Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 40, "seed": 5});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

/// A generator of numbers below `most`.
struct Draws(u64);

impl Draws {
    fn below(&mut self, most: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) % most
    }

    /// A schema of bounded size, so that every answer comes to an end.
    fn schema(&mut self, depth: u32) -> Value {
        match self.below(if depth == 0 { 5 } else { 7 }) {
            0 => json!({"type": "boolean"}),
            1 => json!({"type": "integer", "minimum": -20, "maximum": 200}),
            2 => json!({"enum": ["red", "grün", 3, null]}),
            3 => json!({"type": "string", "maxLength": 1 + self.below(6)}),
            4 => json!({"type": "string", "pattern": "^[a-c]{2,4}-[0-9]{1,3}$"}),
            5 => {
                json!({"type": "array", "items": self.schema(depth - 1), "maxItems": 3, "minItems": self.below(3)})
            }
            _ => {
                let count = 1 + self.below(3);
                let properties: serde_json::Map<String, Value> =
                    (0..count).map(|index| (format!("key {index}"), self.schema(depth - 1))).collect();
                let required: Vec<&String> = properties.keys().take(1 + self.below(count) as usize).collect();
                json!({"type": "object", "required": required, "properties": properties, "additionalProperties": false})
            }
        }
    }
}

/// Whether a value is what the schemas above ask for.
fn keeps_to(schema: &Value, value: &Value) -> bool {
    if let Some(values) = schema["enum"].as_array() {
        return values.contains(value);
    }
    match schema["type"].as_str().unwrap() {
        "boolean" => value.is_boolean(),
        "integer" => {
            value.as_f64().is_some_and(|number| number.fract() == 0.0 && (-20.0..=200.0).contains(&number))
        }
        "string" => value.as_str().is_some_and(|text| match schema["maxLength"].as_u64() {
            Some(most) => text.chars().count() as u64 <= most,
            None => text.split_once('-').is_some_and(|(letters, digits)| {
                (2..=4).contains(&letters.len()) && (1..=3).contains(&digits.len())
            }),
        }),
        "array" => value.as_array().is_some_and(|list| {
            list.len() <= 3
                && list.len() as u64 >= schema["minItems"].as_u64().unwrap()
                && list.iter().all(|one| keeps_to(&schema["items"], one))
        }),
        _ => value.as_object().is_some_and(|object| {
            let required = schema["required"].as_array().unwrap();
            required.iter().all(|key| object.contains_key(key.as_str().unwrap()))
                && object.iter().all(|(key, one)| keeps_to(&schema["properties"][key], one))
        }),
    }
}

#[test]
fn five_hundred_random_schemas_are_kept_to_whatever_the_model_would_say() {
    let forms = Forms::new(Codec::Bytes, 256);
    let mut draws = Draws(7);
    for round in 0..500u64 {
        let schema = draws.schema(3);
        let mut constraint = forms.start(&Form::Schema(schema.clone())).unwrap();
        let (mut answer, options) =
            (Vec::new(), SamplingOptions { temperature: 1.0, seed: round, ..Default::default() });
        while !constraint.is_over() {
            let mut logits: Vec<f32> = (0..256).map(|_| draws.below(1000) as f32 / 100.0).collect();
            constraint.forbid(&mut logits, &[]).unwrap();
            let Ok(choice) = choose(&logits, &options, &[], &answer) else { break };
            answer.push(choice.token);
            constraint.take(choice.token).unwrap();
            assert!(answer.len() < 5000, "{schema} never ends");
        }
        let text = Codec::Bytes.decode(&answer).unwrap();
        let value: Value =
            serde_json::from_str(&text).unwrap_or_else(|error| panic!("{schema}: {text}: {error}"));
        assert!(keeps_to(&schema, &value), "{schema}: {text}");
    }
}

#[test]
fn forms_know_what_the_tokens_of_a_tokenizer_write() {
    let file = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../data/tests/golden/tokenizer.json");
    let codec = Codec::from_file(&file).unwrap();
    // The model knows more tokens than the tokenizer, and text ends with the first.
    let (vocabulary, end) = (codec.vocabulary() as usize + 3, 0);
    let forms = Forms::new(codec.clone(), vocabulary);
    let schema = json!({"type": "object", "required": ["to be"], "additionalProperties": false,
                        "properties": {"to be": {"type": "string", "maxLength": 20}}});
    let mut draws = Draws(3);
    for round in 0..50 {
        let mut constraint = forms.start(&Form::Schema(schema.clone())).unwrap();
        let (mut answer, options) =
            (Vec::new(), SamplingOptions { temperature: 1.0, seed: round, ..Default::default() });
        while !constraint.is_over() {
            let mut logits: Vec<f32> = (0..vocabulary).map(|_| draws.below(1000) as f32 / 100.0).collect();
            logits[end] = 20.0;
            constraint.forbid(&mut logits, &[end as i64]).unwrap();
            let choice = choose(&logits, &options, &[], &answer).unwrap();
            if choice.token == end as i64 {
                break;
            }
            answer.push(choice.token);
            constraint.take(choice.token).unwrap();
        }
        let text = codec.decode(&answer).unwrap();
        let value: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{text}: {error}"));
        assert!(value["to be"].is_string(), "{text}");
    }
}

#[test]
fn a_server_keeps_to_every_form_that_it_is_asked_for() {
    let (_folder, server) = server(None);
    let schema = json!({"type": "object", "required": ["colour"], "additionalProperties": false,
                        "properties": {"colour": {"enum": ["red", "blue"]}}});
    let format =
        json!({"type": "json_schema", "json_schema": {"name": "x", "strict": true, "schema": schema}});
    for temperature in [0, 1] {
        let said = server.post(
            "/v1/chat/completions",
            &chat(json!({"response_format": format, "temperature": temperature, "n": 3, "max_tokens": 250})),
        );
        for choice in said.json()["choices"].as_array().unwrap() {
            let value: Value = serde_json::from_str(choice["message"]["content"].as_str().unwrap()).unwrap();
            assert!(["red", "blue"].contains(&value["colour"].as_str().unwrap()), "{choice}");
            assert_eq!(choice["finish_reason"], "stop");
        }
    }
    for (field, value, right) in [
        (
            "guided_regex",
            json!("[0-9]{3}-[a-f]"),
            (|text| text.len() == 5 && text[3..].starts_with('-')) as fn(&str) -> bool,
        ),
        ("guided_choice", json!(["yes", "no \"never\""]), |text| ["yes", "no \"never\""].contains(&text)),
        ("guided_grammar", json!("start: \"a\" b\nb: /[xy]{2}/"), |text| {
            text.len() == 3 && text.starts_with('a')
        }),
        ("guided_json", json!({"type": "integer", "minimum": 3, "maximum": 5}), |text| {
            ["3", "4", "5"].contains(&text)
        }),
    ] {
        let body = json!({"prompt": "go", "max_tokens": 30, field: value, "logprobs": 1});
        let said = server.post("/v1/completions", &body).json();
        let text = said["choices"][0]["text"].as_str().unwrap_or_else(|| panic!("{field}: {said}"));
        assert!(right(text), "{field}: {text:?}");
        let mut streamed = body.clone();
        streamed["stream"] = true.into();
        streamed["seed"] = 3.into();
        let pieces = server.post("/v1/completions", &streamed).pieces();
        let text: String = pieces.iter().map(|piece| piece["choices"][0]["text"].as_str().unwrap()).collect();
        assert!(right(&text), "{field}, streamed: {text:?}");
    }
}

#[test]
fn a_form_that_makes_no_sense_is_refused_by_its_field() {
    let (_folder, server) = server(None);
    for (field, value) in [
        ("response_format", json!({"type": "xml"})),
        ("response_format", json!({"type": "json_schema"})),
        ("response_format", json!({"type": "json_schema", "json_schema": {"schema": 7}})),
        ("guided_json", json!({"type": "colour"})),
        ("guided_json", json!("{")),
        ("guided_regex", json!("a(")),
        ("guided_choice", json!([])),
        ("guided_grammar", json!("begin: \"a\"")),
    ] {
        let reply = server.post("/v1/chat/completions", &chat(json!({field: value})));
        let error = &reply.json()["error"];
        assert_eq!((reply.status, error["param"].as_str()), (400, Some(field)), "{value}: {error}");
    }
    let both = chat(json!({"guided_regex": "a", "guided_choice": ["b"]}));
    assert_eq!(server.post("/v1/chat/completions", &both).json()["error"]["param"], "guided_choice");
}

fn weather() -> Value {
    json!([{"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": {
        "type": "object", "required": ["city"], "additionalProperties": false,
        "properties": {"city": {"enum": ["Ulm", "Bonn"]}}}}}])
}

#[test]
fn a_tool_that_must_be_called_is_called_with_what_it_takes() {
    let (_folder, server) = server(Some(HERMES));
    for choice in [json!("required"), json!({"type": "function", "function": {"name": "weather"}})] {
        let asked = chat(
            json!({"tools": weather(), "tool_choice": choice, "max_tokens": 200, "parallel_tool_calls": false}),
        );
        let said = server.post("/v1/chat/completions", &asked).json();
        let (message, finish) = (&said["choices"][0]["message"], &said["choices"][0]["finish_reason"]);
        assert_eq!((&message["content"], finish.as_str()), (&Value::Null, Some("tool_calls")), "{said}");
        let call = &message["tool_calls"][0];
        assert_eq!((&call["type"], &call["function"]["name"]), (&json!("function"), &json!("weather")));
        let arguments: Value = serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap();
        assert!(["Ulm", "Bonn"].contains(&arguments["city"].as_str().unwrap()));
        // What was called, and what came of it, goes through the template.
        let asked = chat(json!({"tools": weather(), "max_tokens": 3, "messages": [
            {"role": "user", "content": "hi"}, {"role": "assistant", "content": null, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": "rain"}]}));
        let again = server.post("/v1/chat/completions", &asked);
        assert_eq!(again.status, 200, "{again:?}");

        let mut streamed = chat(
            json!({"tools": weather(), "tool_choice": choice, "max_tokens": 200, "parallel_tool_calls": false}),
        );
        streamed["stream"] = true.into();
        let pieces = server.post("/v1/chat/completions", &streamed).pieces();
        let calls: Vec<&Value> = pieces
            .iter()
            .map(|piece| &piece["choices"][0]["delta"]["tool_calls"][0])
            .filter(|call| !call.is_null())
            .collect();
        assert_eq!(
            (calls.len(), &calls[0]["index"], &calls[0]["function"]["name"]),
            (1, &json!(0), &json!("weather"))
        );
        assert_eq!(pieces.last().unwrap()["choices"][0]["finish_reason"], "tool_calls");
    }
}

#[test]
fn anthropics_messages_say_the_same() {
    let (_folder, server) = server(Some(HERMES));
    let tools = json!([{"name": "weather", "description": "of a city", "input_schema": weather()[0]["function"]["parameters"]}]);
    let body = |more: Value| {
        let mut body = json!({"model": "tiny", "max_tokens": 200, "system": "be kind", "seed": 5, "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi"}]}]});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        body
    };
    let called = body(json!({"tools": tools, "tool_choice": {"type": "tool", "name": "weather"}}));
    let said = server.post("/v1/messages", &called).json();
    assert_eq!((&said["type"], &said["stop_reason"]), (&json!("message"), &json!("tool_use")), "{said}");
    let block = &said["content"][0];
    assert_eq!((&block["type"], &block["name"]), (&json!("tool_use"), &json!("weather")));
    assert!(["Ulm", "Bonn"].contains(&block["input"]["city"].as_str().unwrap()));
    let result = json!({"type": "tool_result", "tool_use_id": block["id"], "content": "rain"});
    let again = body(json!({"tools": tools, "max_tokens": 2, "messages": [
        {"role": "user", "content": "hi"}, {"role": "assistant", "content": [block]}, {"role": "user", "content": [result]}]}));
    let again = server.post("/v1/messages", &again);
    assert_eq!((again.status, &again.json()["stop_reason"]), (200, &json!("max_tokens")), "{again:?}");

    let mut streamed = called.clone();
    streamed["stream"] = true.into();
    let reply = server.post("/v1/messages", &streamed);
    let events: Vec<Value> = reply
        .body
        .lines()
        .filter_map(|line| serde_json::from_str(line.strip_prefix("data: ")?).ok())
        .collect();
    let kinds: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    let whole = [
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ];
    assert_eq!(kinds, whole, "{events:?}");
    let input: Value = serde_json::from_str(events[2]["delta"]["partial_json"].as_str().unwrap()).unwrap();
    assert!(input["city"].is_string() && events[4]["delta"]["stop_reason"] == "tool_use");

    let stopped = body(json!({"stop_sequences": ["never", "A"], "logit_bias": {"65": 100}}));
    let said = server.post("/v1/messages", &stopped).json();
    assert_eq!(
        (&said["stop_reason"], &said["stop_sequence"]),
        (&json!("stop_sequence"), &json!("A")),
        "{said}"
    );
    let counted = server
        .post("/v1/messages/count_tokens", &json!({"messages": [{"role": "user", "content": "hi"}]}))
        .json();
    assert_eq!(counted["input_tokens"], "<user>hi<assistant>".len());
    for more in [
        json!({"tools": [{"type": "web_search", "name": "x"}]}),
        json!({"thinking": {"type": "deeply"}}),
        json!({"colour": 1}),
        json!({"messages": [{"role": "user", "content": [{"type": "image"}]}]}),
    ] {
        let reply = server.post("/v1/messages", &body(more.clone()));
        assert_eq!(
            (reply.status, &reply.json()["error"]["type"]),
            (400, &json!("invalid_request_error")),
            "{more}"
        );
    }
}

#[test]
fn what_is_said_of_tools_and_cannot_be_is_refused() {
    let (_folder, with) = server(Some(HERMES));
    let (_other, without) = server(None);
    let reply = without.post("/v1/chat/completions", &chat(json!({"tools": weather()})));
    assert!(
        reply.status == 400
            && reply.json()["error"]["message"].as_str().unwrap().contains("no place for tools")
    );
    let fine =
        without.post("/v1/chat/completions", &chat(json!({"tools": weather(), "tool_choice": "none"})));
    assert_eq!(fine.status, 200);
    let twice = json!([weather()[0], weather()[0]]);
    for (field, more) in [
        ("tools", json!({"tools": {}})),
        ("tools[0]", json!({"tools": [{"type": "magic"}]})),
        ("tools[0]", json!({"tools": [{"type": "function", "function": {"name": "a b"}}]})),
        ("tools[1]", json!({"tools": twice})),
        ("tool_choice", json!({"tool_choice": "required"})),
        ("tool_choice", json!({"tools": weather(), "tool_choice": "perhaps"})),
        (
            "tool_choice",
            json!({"tools": weather(), "tool_choice": {"type": "function", "function": {"name": "time"}}}),
        ),
        ("parallel_tool_calls", json!({"tools": weather(), "parallel_tool_calls": 2})),
        ("chat_template_kwargs", json!({"chat_template_kwargs": 3})),
        ("continue_final_message", json!({"continue_final_message": true, "add_generation_prompt": true})),
        ("messages[0].tool_calls", json!({"messages": [{"role": "assistant", "tool_calls": ["x"]}]})),
        (
            "response_format",
            json!({"tools": weather(), "tool_choice": "required", "response_format": {"type": "json_object"}}),
        ),
    ] {
        let reply = with.post("/v1/chat/completions", &chat(more.clone()));
        let error = &reply.json()["error"];
        assert_eq!((reply.status, error["param"].as_str()), (400, Some(field)), "{more}: {error}");
    }
}

#[test]
fn templates_are_told_what_a_request_says_and_messages_can_be_gone_on_with() {
    let (_folder, server) = server(Some(HERMES));
    let tokens = |more: Value| {
        let mut body =
            json!({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "So "}]});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let reply = server.post("/tokenize", &body).json();
        let told = server.post("/detokenize", &json!({"tokens": reply["tokens"]})).json();
        assert_eq!(reply["count"].as_u64().unwrap() as usize, reply["tokens"].as_array().unwrap().len());
        told["prompt"].as_str().unwrap().to_owned()
    };
    assert_eq!(tokens(json!({})), "<user>hi<assistant>So <assistant>");
    assert_eq!(
        tokens(json!({"chat_template_kwargs": {"enable_thinking": true}})),
        "<user>hi<assistant>So <assistant><think>"
    );
    assert_eq!(tokens(json!({"add_generation_prompt": false})), "<user>hi<assistant>So ");
    assert_eq!(tokens(json!({"continue_final_message": true})), "<user>hi<assistant>So");
    assert_eq!(server.post("/tokenize", &json!({"prompt": "ab"})).json()["tokens"], json!([97, 98]));
    // A thought that the prompt has begun is parted from the answer, as far as there is one.
    let open = chat(
        json!({"chat_template_kwargs": {"enable_thinking": true}, "guided_regex": "h?m</think>\\n\\nYes"}),
    );
    let message = server.post("/v1/chat/completions", &open).json()["choices"][0]["message"].clone();
    assert_eq!(message["content"], "Yes", "{message}");
    assert!(message["reasoning_content"].as_str().unwrap().ends_with('m'));
}
