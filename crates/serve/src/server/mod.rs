//! OpenAI's endpoints over HTTP, a page to chat on, and what operators look at.
//!
//! It answers on loopback unless told otherwise. Everything a client sends is bounded and checked before the engine sees it;
//! what is wrong gets a 4xx in OpenAI's shape. Reading order: this file, `listen` (connections), `room` (how many), `wire` (their bytes), `guard` (who may ask),
//! `parameters`, `form`, `tools` and `fields` (what is asked), `completions`, `chat`, `messages`, `embeddings` and `tokens` (the endpoints), `reply` and
//! `stream` (the answers), `spoken` and `calls` (what of an answer is thought, said, or a call of a tool).

mod calls;
mod chat;
mod completions;
mod descriptors;
mod embeddings;
mod fault;
mod fields;
mod form;
mod guard;
mod listen;
mod messages;
mod parameters;
mod reply;
mod room;
mod spoken;
mod stream;
mod tokens;
mod tools;
mod wire;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::Router;
use axum::extract::rejection::PathRejection;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use serde_json::json;

use crate::constrain::Forms;
use crate::engine::Engine;
use crate::model::ModelFacts;
use fault::Fault;
pub use listen::{Server, run};

/// What the server allows.
#[derive(Debug, Clone)]
pub struct ServerOptions {
    /// Keys that clients must send; none: everyone may ask.
    pub api_keys: Vec<String>,
    /// Bytes of a request, at most.
    pub max_body_bytes: usize,
    /// Time for a request, from its arrival to its last token.
    pub request_time: Duration,
    /// Connections at once, as far as the process may open files. Where there are more, those without a request in work give way.
    pub max_connections: usize,
    /// Time that running requests get when the server is told to stop.
    pub grace: Duration,
}

impl Default for ServerOptions {
    fn default() -> Self {
        ServerOptions {
            api_keys: Vec::new(),
            max_body_bytes: 4 << 20,
            request_time: Duration::from_secs(600),
            max_connections: 1024,
            grace: Duration::from_secs(30),
        }
    }
}

/// What the endpoints share.
struct App {
    engine: Engine,
    options: ServerOptions,
    guard: guard::Guard,
    forms: Arc<Forms>,
    started_s: u64,
    /// Tells one server's answers from another's.
    run: u64,
    answers: AtomicU64,
}

impl App {
    fn facts(&self) -> &ModelFacts {
        self.engine.facts()
    }

    /// A name for an answer that no other has.
    fn next_id(&self, prefix: &str) -> String {
        format!("{prefix}-{:016x}{:08x}", self.run, self.answers.fetch_add(1, Relaxed))
    }
}

fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Numbers that nobody can foresee: for names, and for draws whose client gave no seed.
fn unforeseen() -> u64 {
    use std::hash::{BuildHasher, Hasher};
    std::hash::RandomState::new().build_hasher().finish()
}

fn router(engine: Engine, options: ServerOptions, address: SocketAddr) -> (Router, Arc<App>) {
    let guard = guard::Guard::new(&options.api_keys, address);
    let limit = DefaultBodyLimit::max(options.max_body_bytes);
    let (started_s, run) = (now_s(), unforeseen());
    let forms = Arc::new(Forms::new(engine.facts().codec.clone(), engine.facts().vocabulary));
    let app = Arc::new(App { engine, options, guard, forms, started_s, run, answers: AtomicU64::new(0) });
    let router = Router::new()
        .route("/v1/completions", post(completions::answer))
        .route("/v1/chat/completions", post(chat::answer))
        .route("/v1/messages", post(messages::answer))
        .route("/v1/messages/count_tokens", post(messages::count))
        .route("/v1/embeddings", post(embeddings::answer))
        .route("/tokenize", post(tokens::tokenize))
        .route("/detokenize", post(tokens::detokenize))
        .route("/v1/models", get(models))
        .route("/v1/models/{*name}", get(model))
        .route("/metrics", get(metrics))
        .route("/health", get(health))
        .route("/", get(|| async { part("text/html; charset=utf-8", include_str!("page.html")) }))
        .route("/chat.js", get(|| async { part("text/javascript; charset=utf-8", include_str!("chat.js")) }))
        .route("/chat.css", get(|| async { part("text/css; charset=utf-8", include_str!("chat.css")) }))
        .fallback(|| async { Fault::not_found("there is nothing here; see /v1/models") })
        .method_not_allowed_fallback(|| async { Fault::method() })
        .layer(limit)
        .layer(axum::middleware::from_fn_with_state(Arc::clone(&app), guard::check))
        .with_state(Arc::clone(&app));
    (router, app)
}

fn describe(app: &App) -> serde_json::Value {
    json!({
        "id": app.facts().name, "object": "model", "created": app.started_s, "owned_by": "ferrospeed",
        "max_model_len": app.engine.limits().sequence_tokens,
    })
}

async fn models(State(app): State<Arc<App>>) -> Response {
    axum::Json(json!({"object": "list", "data": [describe(&app)]})).into_response()
}

async fn model(
    State(app): State<Arc<App>>,
    name: Result<axum::extract::Path<String>, PathRejection>,
) -> Response {
    match name {
        Ok(name) if *name == app.facts().name => axum::Json(describe(&app)).into_response(),
        Ok(name) => Fault::no_model(&name, &app.facts().name).into_response(),
        Err(_) => {
            let why = "the path is no UTF-8 text once its %-escapes are read; see /v1/models for names";
            Fault::new(StatusCode::BAD_REQUEST, why).into_response()
        }
    }
}

async fn metrics(State(app): State<Arc<App>>) -> Response {
    let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    ([(header::CONTENT_TYPE, kind)], app.engine.metrics().render()).into_response()
}

async fn health(State(app): State<Arc<App>>) -> Response {
    let (status, word) = if app.engine.is_alive() {
        (StatusCode::OK, "ok")
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "stopping")
    };
    (status, axum::Json(json!({"status": word}))).into_response()
}

/// Only the page's own script and style run, and it talks to nobody else.
const PAGE_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; \
     base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

/// A part of the chat page.
fn part(kind: &'static str, text: &'static str) -> Response {
    let headers = [
        (header::CONTENT_TYPE, kind),
        (header::CONTENT_SECURITY_POLICY, PAGE_POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
    ];
    (headers.map(|(name, value)| (name, HeaderValue::from_static(value))), text).into_response()
}
