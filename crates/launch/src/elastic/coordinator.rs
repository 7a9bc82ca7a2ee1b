//! The coordinator: a [`Course`] with sockets, agents and a clock.
//!
//! A thread per connection reads; one loop takes events, asks the course, and writes. Connections that do not prove themselves
//! in time are closed, and at most 256 of them wait at once.

use std::collections::HashMap;
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use super::course::{Action, Course, Event, Limits, NodeId, Verdict};
use super::hosts::{Host, Hosts};
use super::message::{FromAgent, ToAgent};
use super::signed::{Reader, Role, Writer, meet};
use super::{PULSE, SILENCE};
use crate::error::LaunchError;
use crate::supervise::{Orders, SignalHandling, Supervisor, SupervisorOptions};

/// Connections of which nobody knows yet whose they are.
const MOST_UNPROVEN: usize = 256;

/// How long agents may take to go when the job is over.
const PARTING: Duration = Duration::from_secs(5);

/// What a coordinator needs to know.
#[derive(Debug)]
pub struct JobOptions {
    /// What bounds the job.
    pub limits: Limits,
    /// Where agents call, and ranks of other nodes reach those of this one.
    pub address: String,
    /// The port; a free one when 0.
    pub port: u16,
    /// The job's token.
    pub token: String,
    /// The hosts on which agents are started.
    pub hosts: Vec<Host>,
    /// After how long an agent that ended by itself is started again; never when absent.
    pub retry: Option<Duration>,
}

/// A coordinator that listens.
#[derive(Debug)]
pub struct ElasticJob {
    options: JobOptions,
    listener: TcpListener,
    supervisor: Supervisor,
}

/// What threads tell the loop.
enum News {
    /// An agent has proven itself.
    Came(NodeId, String, Vec<u32>, String, Writer),
    Event(Event),
}

impl ElasticJob {
    /// Begins to listen, and to watch for signals.
    pub fn new(mut options: JobOptions) -> Result<ElasticJob, LaunchError> {
        let system = |source| LaunchError::System { action: "listen for agents", source };
        let listener = TcpListener::bind(("0.0.0.0", options.port)).map_err(system)?;
        options.port = listener.local_addr().map_err(system)?.port();
        let supervisor = Supervisor::new(SupervisorOptions {
            host: crate::surroundings::host_name(),
            log_dir: None,
            interrupt_grace: Duration::ZERO,
            signals: SignalHandling::Forward,
            orders: Orders::default(),
        })?;
        Ok(ElasticJob { options, listener, supervisor })
    }

    /// Where agents call.
    pub fn meeting_point(&self) -> String {
        format!("{}:{}", self.options.address, self.options.port)
    }

    /// Leads the job to its end; `tell` shows the user what happens.
    pub fn run(self, mut tell: impl FnMut(&str)) -> Result<Verdict, LaunchError> {
        let meeting_point = self.meeting_point();
        let (news, heard) = channel();
        listen(self.listener, self.options.token.clone(), self.options.address.clone(), news.clone())?;
        let mut hosts = Hosts::start(
            self.options.hosts,
            self.options.retry,
            &meeting_point,
            &self.options.token,
            news_of(&news),
        );
        let (start, mut pulse) = (Instant::now(), Instant::now());
        let (mut course, mut writers) = (Course::new(self.options.limits), HashMap::new());
        loop {
            let mut events = wait(&heard, &mut writers);
            // SIGUSR2 too: by it batch systems say that time is nearly over.
            events.extend(self.supervisor.take_signal().map(Event::Interrupted));
            if pulse.elapsed() >= PULSE {
                pulse = Instant::now();
                let all: Vec<NodeId> = writers.keys().copied().collect();
                events.extend(all.into_iter().filter_map(|id| send(&mut writers, id, &ToAgent::Alive)));
                hosts.look_after(&course.present().collect::<Vec<_>>());
            }
            for event in events {
                if let Event::Gone(id, _) = &event {
                    writers.remove(id).iter().for_each(|writer: &Writer| writer.close());
                }
                for action in course.on(event, start.elapsed()) {
                    match action {
                        // Who does not take it is gone, and its reader says so.
                        Action::Send(id, message) => drop(send(&mut writers, id, &message)),
                        Action::Tell(text) => tell(&text),
                        Action::End(verdict) => {
                            hosts.part(PARTING);
                            return Ok(verdict);
                        }
                    }
                }
            }
        }
    }
}

/// Hands on what is said of hosts.
fn news_of(news: &Sender<News>) -> impl Fn(Event) + 'static {
    let news = news.clone();
    // The loop is gone only when the job is over.
    move |event| drop(news.send(News::Event(event)))
}

/// The next events; time passes where there are none.
fn wait(heard: &Receiver<News>, writers: &mut HashMap<NodeId, Writer>) -> Vec<Event> {
    const TICK: Duration = Duration::from_millis(50);
    let first = heard.recv_timeout(TICK).ok();
    let mut events = Vec::new();
    for news in first.into_iter().chain(heard.try_iter()) {
        events.push(match news {
            News::Came(node, name, slots, addr, writer) => {
                writers.insert(node, writer);
                Event::Came { node, name, slots, addr }
            }
            News::Event(event) => event,
        });
    }
    events.push(Event::Tick);
    events
}

/// Sends a message; what became of the node where that fails.
fn send(writers: &mut HashMap<NodeId, Writer>, id: NodeId, message: &ToAgent) -> Option<Event> {
    let error = writers.get_mut(&id)?.send(message).err()?;
    Some(Event::Gone(id, format!("nothing can be said to it ({error})")))
}

/// Takes connections until the process ends.
fn listen(listener: TcpListener, token: String, own: String, news: Sender<News>) -> Result<(), LaunchError> {
    let unproven = Arc::new(AtomicUsize::new(0));
    let accepting = move || {
        for (id, stream) in (0..).zip(listener.incoming()) {
            let Ok(stream) = stream else {
                // No descriptors, say: those that are open go on.
                std::thread::sleep(Duration::from_millis(50));
                continue;
            };
            if unproven.fetch_add(1, Ordering::SeqCst) >= MOST_UNPROVEN {
                unproven.fetch_sub(1, Ordering::SeqCst);
                continue;
            }
            let (token, own, news, counted) = (token.clone(), own.clone(), news.clone(), unproven.clone());
            let serving = move || {
                let proven = prove(stream, &token, &own);
                counted.fetch_sub(1, Ordering::SeqCst);
                // A stranger is not worth a word.
                let Ok((reader, writer, name, slots, addr)) = proven else { return };
                if news.send(News::Came(id, name, slots, addr, writer)).is_ok() {
                    read(id, reader, &news);
                }
            };
            // Without a thread for it the connection closes, and the agent calls again.
            let _ =
                std::thread::Builder::new().name("agent-reader".into()).stack_size(256 << 10).spawn(serving);
        }
    };
    let spawned = std::thread::Builder::new().name("agents".into()).spawn(accepting);
    spawned.map(drop).map_err(|source| LaunchError::System { action: "start a thread", source })
}

/// Who calls, and from where its node is reached.
fn prove(
    stream: TcpStream,
    token: &str,
    own: &str,
) -> std::io::Result<(Reader, Writer, String, Vec<u32>, String)> {
    let peer = stream.peer_addr()?.ip().to_canonical();
    let (mut reader, writer) = meet(stream, token, Role::Coordinator)?;
    let FromAgent::Hello { name, slots } = reader.receive()? else {
        return Err(std::io::ErrorKind::InvalidData.into());
    };
    reader.wait_at_most(SILENCE)?;
    // An agent of this host may call by its loopback, where nobody else would find it.
    let addr = if peer.is_loopback() { own.to_owned() } else { peer.to_string() };
    Ok((reader, writer, name, slots, addr))
}

/// Passes on what an agent says until it is gone.
fn read(id: NodeId, mut reader: Reader, news: &Sender<News>) {
    loop {
        let event = match reader.receive() {
            Ok(said) => Event::Said(id, said),
            Err(error) => Event::Gone(id, why_lost(&error)),
        };
        let is_last = matches!(event, Event::Gone(..));
        if news.send(News::Event(event)).is_err() || is_last {
            return;
        }
    }
}

fn why_lost(error: &std::io::Error) -> String {
    match error.kind() {
        std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut => {
            format!("nothing was heard of it for {} s (stopped, or cut off)", SILENCE.as_secs())
        }
        std::io::ErrorKind::UnexpectedEof | std::io::ErrorKind::ConnectionReset => {
            "its agent has ended".to_owned()
        }
        _ => format!("its connection failed ({error})"),
    }
}
