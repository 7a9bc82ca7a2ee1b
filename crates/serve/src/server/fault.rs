//! What is wrong with a request, in the shape of OpenAI's errors.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use crate::core::schedule::Refusal;
use crate::request::Trouble;

/// An error for the client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Fault {
    pub(crate) status: StatusCode,
    pub(crate) message: String,
    pub(crate) param: Option<String>,
    pub(crate) code: Option<&'static str>,
}

impl Fault {
    pub(crate) fn new(status: StatusCode, message: impl Into<String>) -> Fault {
        Fault { status, message: message.into(), param: None, code: None }
    }

    /// A field that says what cannot be.
    pub(crate) fn field(param: impl Into<String>, message: impl Into<String>) -> Fault {
        let param = param.into();
        let message = format!("{param}: {}", message.into());
        Fault { param: Some(param), ..Fault::new(StatusCode::BAD_REQUEST, message) }
    }

    pub(crate) fn not_found(message: &str) -> Fault {
        Fault::new(StatusCode::NOT_FOUND, message)
    }

    pub(crate) fn method() -> Fault {
        Fault::new(StatusCode::METHOD_NOT_ALLOWED, "this path takes another method")
    }

    pub(crate) fn no_model(asked: &str, served: &str) -> Fault {
        let shown: String = asked.chars().take(100).collect();
        let mut fault = Fault::field("model", format!("'{shown}' is not served here; '{served}' is"));
        (fault.status, fault.code) = (StatusCode::NOT_FOUND, Some("model_not_found"));
        fault
    }

    /// A request that says twice, and not the same way, where it ends.
    pub(crate) fn two_ends() -> Fault {
        let why = "a request has Content-Length or Transfer-Encoding, not both: where it ends must not depend on who reads it";
        Fault { code: Some("ambiguous_length"), ..Fault::new(StatusCode::BAD_REQUEST, why) }
    }

    pub(crate) fn kind(&self) -> &'static str {
        match self.status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::FORBIDDEN => "permission_error",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            StatusCode::GATEWAY_TIMEOUT | StatusCode::REQUEST_TIMEOUT => "timeout_error",
            status if status.is_server_error() => "server_error",
            _ => "invalid_request_error",
        }
    }

    pub(crate) fn body(&self) -> Value {
        json!({"error": {"message": self.message, "type": self.kind(), "param": self.param, "code": self.code}})
    }
}

impl From<Trouble> for Fault {
    fn from(trouble: Trouble) -> Fault {
        let (status, code) = match &trouble {
            Trouble::Refused(Refusal::QueueFull { .. }) => {
                (StatusCode::TOO_MANY_REQUESTS, Some("queue_full"))
            }
            Trouble::Refused(Refusal::TooLong { .. }) => {
                (StatusCode::BAD_REQUEST, Some("context_length_exceeded"))
            }
            Trouble::Refused(Refusal::Empty) => (StatusCode::BAD_REQUEST, None),
            Trouble::TimedOut => (StatusCode::GATEWAY_TIMEOUT, None),
            Trouble::ShuttingDown => (StatusCode::SERVICE_UNAVAILABLE, None),
            Trouble::Failed(_) => (StatusCode::INTERNAL_SERVER_ERROR, None),
        };
        let fault = Fault::new(status, trouble.to_string());
        Fault { code: code.or(fault.code), ..fault }
    }
}

impl IntoResponse for Fault {
    fn into_response(self) -> Response {
        let mut response = (self.status, axum::Json(self.body())).into_response();
        if self.status == StatusCode::TOO_MANY_REQUESTS {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        if self.code == Some("ambiguous_length") {
            response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}
