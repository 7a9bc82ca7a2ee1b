//! Connections: how many, how slow they may be, and how they end.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use axum::Router;
use axum::http::Request;
use axum::response::IntoResponse;
use hyper::body::{Body, Incoming};
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::{GracefulConnection, GracefulShutdown};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::signal::unix::{SignalKind, signal};

use super::fault::Fault;
use super::room::{Arriving, Place, Room};
use super::wire::Wire;
use super::{App, ServerOptions, descriptors, router};
use crate::engine::Engine;
use crate::error::{Result, ServeError};

/// Time for a client to send its request's head.
const HEAD_TIME: Duration = Duration::from_secs(15);
/// Bytes of a request's head, and of what is read ahead of its body.
pub(super) const HEAD_BYTES: usize = 64 << 10;
/// What connections get beyond the grace of their requests, to send what they have.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// A server that is bound to its address.
pub struct Server {
    listener: TcpListener,
    address: SocketAddr,
    router: Router,
    app: Arc<App>,
}

impl Server {
    /// Takes the address. Must be called inside a tokio runtime.
    pub async fn bind(address: SocketAddr, engine: Engine, options: ServerOptions) -> Result<Server> {
        let failed = |error| ServeError::Io { what: format!("cannot listen on {address}"), error };
        let listener = TcpListener::bind(address).await.map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let (router, app) = router(engine, options, address);
        Ok(Server { listener, address, router, app })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Answers until `stop` is ready; then lets what runs finish within the grace, and ends.
    pub async fn run(self, stop: impl Future<Output = ()>) {
        let options = &self.app.options;
        let room = Room::new(descriptors::allow(options.max_connections), arriving_bytes(options));
        let graceful = GracefulShutdown::new();
        tokio::pin!(stop);
        loop {
            let stream = tokio::select! {
                accepted = self.listener.accept() => accepted,
                () = &mut stop => break,
            };
            let stream = match stream {
                Ok((stream, _)) => stream,
                Err(error) => {
                    // Out of descriptors, most likely: those that close make room.
                    tracing::warn!("cannot take a connection: {error}");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                    continue;
                }
            };
            let place = tokio::select! {
                place = room.enter() => place,
                () = &mut stop => break,
            };
            let connection = graceful.watch(connection(stream, self.router.clone(), Arc::clone(&place)));
            tokio::spawn(async move {
                tokio::select! {
                    // A connection that breaks is its client's affair.
                    _ = connection => {}
                    () = place.is_needed() => {}
                }
            });
        }
        drop(self.listener);
        room.close();
        let grace = self.app.options.grace;
        let app = Arc::clone(&self.app);
        let deadline = Instant::now() + grace;
        let stopped = tokio::task::spawn_blocking(move || app.engine.stop(deadline));
        let ended = async {
            graceful.shutdown().await;
            // A panic of the engine was reported where it was seen.
            let _ = stopped.await;
        };
        if tokio::time::timeout(grace + LAST_WORDS, ended).await.is_err() {
            tracing::warn!("some connections did not end within the grace; they are cut off");
        }
    }
}

fn connection(stream: TcpStream, router: Router, place: Arc<Place>) -> impl GracefulConnection + Send {
    // Tokens are small and should not wait for each other.
    let _ = stream.set_nodelay(true);
    let wire = Wire::new(stream, Arc::clone(&place));
    let (has_two_ends, answers) = (wire.has_two_ends(), TowerToHyperService::new(router));
    let service = service_fn(move |request| {
        let (refused, answers) = (has_two_ends.load(Relaxed), answers.clone());
        let mut request: Request<Incoming> = request;
        let work = place.work(!request.body().is_end_stream());
        request.extensions_mut().insert(Arc::clone(&place));
        let request = request.map(|body| Arriving::new(body, Arc::clone(&place)));
        async move {
            let answer = match refused {
                true => Fault::two_ends().into_response(),
                false => answers.call(request).await?,
            };
            Ok::<_, Infallible>(work.until_sent(answer))
        }
    });
    hyper::server::conn::http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIME)
        .max_buf_size(HEAD_BYTES)
        .serve_connection(TokioIo::new(wire), service)
}

/// Bytes of bodies that may be on their way together: of a few dozen whole ones.
fn arriving_bytes(options: &ServerOptions) -> usize {
    options.max_body_bytes.saturating_mul(64)
}

/// Waits until nothing can be answered any more.
async fn is_lost(app: &App) {
    while app.engine.lost().is_none() {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Serves until the process is told to end (SIGINT, SIGTERM) or the model is lost, on threads of its own. `ready` is told the address.
pub fn run(
    address: SocketAddr,
    engine: Engine,
    options: ServerOptions,
    ready: impl FnOnce(SocketAddr),
) -> Result<()> {
    let failed = |what: &str| {
        let what = what.to_owned();
        move |error| ServeError::Io { what, error }
    };
    descriptors::raise();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(failed("cannot start the server's threads"))?;
    runtime.block_on(async {
        let mut interrupted = signal(SignalKind::interrupt()).map_err(failed("cannot wait for SIGINT"))?;
        let mut terminated = signal(SignalKind::terminate()).map_err(failed("cannot wait for SIGTERM"))?;
        let server = Server::bind(address, engine, options).await?;
        ready(server.address());
        let app = Arc::clone(&server.app);
        let lost = Arc::clone(&app);
        server
            .run(async move {
                tokio::select! {
                    _ = interrupted.recv() => {}
                    _ = terminated.recv() => {}
                    () = is_lost(&lost) => {}
                }
            })
            .await;
        match app.engine.lost() {
            Some(why) => Err(ServeError::Together(why.to_owned())),
            None => Ok(()),
        }
    })
}
