//! The agent of a node: calls the coordinator, and runs the ranks of its node round by round.
//!
//! A signal that would end a job (or SIGUSR2, by which batch systems give notice) makes its node leave: its ranks are told to save,
//! the coordinator hears of it and has the others do the same, and the job goes on without this node.

use std::net::{TcpStream, ToSocketAddrs};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::message::{Failure, FromAgent, RoundEnd, Start, ToAgent};
use super::signed::{Reader, Role, Writer, meet};
use super::{EXIT_SAVED, PULSE, ROUND_VARIABLE, SILENCE};
use crate::error::LaunchError;
use crate::exports::Environment;
use crate::node::{Elastic, Machine, NodeLaunch};
use crate::run::{RunOptions, log_name, make_log_dir, timestamp};
use crate::supervise::{JobOutcome, Order, Orders, ProcessSpec, Supervisor, SupervisorOptions};
use crate::{cores, surroundings};

/// How often signals are looked at while no rank runs.
const TICK: Duration = Duration::from_millis(50);

/// What an agent needs to know.
#[derive(Debug, Clone)]
pub struct AgentOptions {
    /// Where the coordinator listens: `HOST:PORT`.
    pub meet: String,
    /// What its node is called.
    pub name: String,
    /// Slots for ranks.
    pub slots: Vec<u32>,
    /// The job's token.
    pub token: String,
    /// How long to look for the coordinator.
    pub patience: Duration,
    /// What its ranks run; who is in a round and where it meets is filled in.
    pub node: NodeLaunch,
    /// How its ranks are run.
    pub run: RunOptions,
}

/// How an agent came to its end: the exit code, and what to say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AgentEnd {
    /// The job is over, with this exit code.
    Over(u8),
    /// It was told to leave, by this signal.
    Left(i32),
    /// Its coordinator is gone.
    Forsaken(String),
}

/// What the reader hands to the rounds.
enum News {
    Start(Box<Start>),
    Over(u8),
    Lost(String),
}

type SharedWriter = Arc<Mutex<Writer>>;

/// Runs the ranks of this node until the job is over, or this node leaves it.
pub fn run_agent(options: &AgentOptions, environment: Environment) -> Result<AgentEnd, LaunchError> {
    let log_dir = options.node.log_dir.as_ref().map(|folder| make_log_dir(folder.as_ref())).transpose()?;
    let orders = Orders::default();
    let supervisor = Supervisor::new(SupervisorOptions {
        host: options.name.clone(),
        log_dir,
        interrupt_grace: options.run.interrupt_grace,
        signals: options.run.signals.clone(),
        orders: orders.clone(),
    })?;
    let (reader, writer) = match call(options, &supervisor)? {
        Called::Taken(connection) => *connection,
        Called::Told(signal) => return Ok(AgentEnd::Left(signal)),
    };
    let writer = Arc::new(Mutex::new(writer));
    let (news, heard) = channel();
    listen(reader, orders.clone(), news)?;
    pulse(writer.clone(), orders.clone())?;
    let machine = Machine {
        environment,
        python: surroundings::python(),
        job_token: options.token.clone(),
        topology: cores::Topology::read(),
        restart_count: 0,
    };
    Agent {
        options,
        supervisor,
        orders,
        writer,
        heard,
        machine,
        started: timestamp(std::time::SystemTime::now()),
    }
    .stay()
}

struct Agent<'a> {
    options: &'a AgentOptions,
    supervisor: Supervisor,
    orders: Orders,
    writer: SharedWriter,
    heard: Receiver<News>,
    machine: Machine,
    started: String,
}

impl Agent<'_> {
    fn stay(mut self) -> Result<AgentEnd, LaunchError> {
        loop {
            if let Err(why) = self.say(&FromAgent::Ready { port: surroundings::free_port()? }) {
                return Ok(AgentEnd::Forsaken(why));
            }
            let start = match self.next()? {
                Next::Round(start) => start,
                Next::End(end) => return Ok(end),
            };
            let round = start.round;
            let how = self.round(*start)?;
            if let Some(signal) = self.orders.heard() {
                let why = format!("its agent got signal {signal}");
                // Said by its pulse already, or now: the coordinator must know before it hears how the ranks went.
                drop(self.say(&FromAgent::Leaving { why }));
                drop(self.say(&FromAgent::Ended { round, how }));
                return Ok(AgentEnd::Left(signal));
            }
            if let Err(why) = self.say(&FromAgent::Ended { round, how }) {
                return Ok(AgentEnd::Forsaken(why));
            }
        }
    }

    fn say(&self, what: &FromAgent) -> Result<(), String> {
        let mut writer = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        writer.send(what).map_err(|error| format!("nothing can be said to it ({error})"))
    }

    /// What comes after this node is ready.
    fn next(&mut self) -> Result<Next, LaunchError> {
        loop {
            match self.heard.recv_timeout(TICK) {
                Ok(News::Start(start)) => return Ok(Next::Round(start)),
                Ok(News::Over(code)) => return Ok(Next::End(AgentEnd::Over(code))),
                Ok(News::Lost(why)) => return Ok(Next::End(AgentEnd::Forsaken(why))),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    return Ok(Next::End(AgentEnd::Forsaken("its reader has ended".to_owned())));
                }
            }
            if let Some(signal) = self.supervisor.pause(Duration::ZERO).or_else(|| self.orders.heard()) {
                let why = format!("its agent got signal {signal}");
                drop(self.say(&FromAgent::Leaving { why }));
                return Ok(Next::End(AgentEnd::Left(signal)));
            }
        }
    }

    /// Runs the ranks of this node in one round.
    fn round(&mut self, start: Start) -> Result<RoundEnd, LaunchError> {
        let Start { round, nodes, node_rank, master_addr, master_port, restarts, max_restarts } = start;
        self.machine.restart_count = restarts;
        self.machine.environment.insert(ROUND_VARIABLE.to_owned(), round.to_string());
        let node = NodeLaunch {
            world: nodes.into_iter().collect(),
            node_rank,
            master_addr,
            master_port,
            elastic: Some(Elastic { min_nodes: None, max_nodes: None, max_restarts }),
            ..self.options.node.clone()
        };
        let ranks = node.rank_specs(&self.machine)?;
        let specs: Vec<ProcessSpec> = ranks
            .into_iter()
            .map(|rank| {
                let log = log_name(&self.started, rank.rank, round);
                ProcessSpec::of_rank(rank, self.options.run.output, Some(log))
            })
            .collect();
        let outcome = self.supervisor.run(&specs)?;
        // What was ordered of a round that is over concerns none.
        self.orders.forget();
        Ok(end_of(&outcome))
    }
}

enum Next {
    Round(Box<Start>),
    End(AgentEnd),
}

fn end_of(outcome: &JobOutcome) -> RoundEnd {
    match outcome {
        JobOutcome::Succeeded | JobOutcome::Interrupted { all_well: true, .. } => RoundEnd::Well,
        JobOutcome::Interrupted { agreed_code: Some(EXIT_SAVED), .. } => RoundEnd::Saved,
        JobOutcome::Interrupted { .. } => RoundEnd::Stopped,
        JobOutcome::Failed(failure) if failure.ended.exit_code() == EXIT_SAVED => RoundEnd::Saved,
        JobOutcome::Failed(failure) => RoundEnd::Failed(Failure {
            said: failure.to_string(),
            code: failure.ended.exit_code(),
            follows: failure.ended.is_followers(),
        }),
    }
}

enum Called {
    Taken(Box<(Reader, Writer)>),
    /// A signal came first.
    Told(i32),
}

/// Calls the coordinator until it answers, and is let in.
fn call(options: &AgentOptions, supervisor: &Supervisor) -> Result<Called, LaunchError> {
    const AGAIN: Duration = Duration::from_millis(500);
    let end = Instant::now() + options.patience;
    let refuse = |reason: String| LaunchError::Coordinator { meet: options.meet.clone(), reason };
    loop {
        let error = match try_call(options) {
            Ok(connection) => return Ok(Called::Taken(Box::new(connection))),
            Err(error) => error,
        };
        // Who knows another token, or none, will not know ours later.
        if error.kind() == std::io::ErrorKind::InvalidData || Instant::now() >= end {
            return Err(refuse(error.to_string()));
        }
        if let Some(signal) = supervisor.pause(AGAIN) {
            return Ok(Called::Told(signal));
        }
    }
}

fn try_call(options: &AgentOptions) -> std::io::Result<(Reader, Writer)> {
    let mut last = std::io::Error::other("its name has no address");
    for address in options.meet.to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, SILENCE) {
            Ok(stream) => return say_hello(stream, options),
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn say_hello(stream: TcpStream, options: &AgentOptions) -> std::io::Result<(Reader, Writer)> {
    let (mut reader, mut writer) = meet(stream, &options.token, Role::Agent)?;
    writer.send(&FromAgent::Hello { name: options.name.clone(), slots: options.slots.clone() })?;
    match reader.receive()? {
        ToAgent::Welcome { .. } => {}
        ToAgent::Over { .. } => return Err(std::io::Error::other("the job is over")),
        _ => return Err(std::io::ErrorKind::InvalidData.into()),
    }
    reader.wait_at_most(SILENCE)?;
    Ok((reader, writer))
}

/// Hears the coordinator until it is gone; what it orders of running ranks goes to their supervisor at once.
fn listen(mut reader: Reader, orders: Orders, news: Sender<News>) -> Result<(), LaunchError> {
    let listening = move || {
        loop {
            let passed_on = match reader.receive() {
                Ok(ToAgent::Alive | ToAgent::Welcome { .. }) => Ok(()),
                Ok(ToAgent::Leave) => {
                    orders.give(Order::Leave);
                    Ok(())
                }
                Ok(ToAgent::End) => {
                    orders.give(Order::End);
                    Ok(())
                }
                Ok(ToAgent::Start(start)) => {
                    // Before the round is handed on: an order that follows is about it.
                    orders.forget();
                    news.send(News::Start(Box::new(start)))
                }
                Ok(ToAgent::Over { code }) => {
                    orders.give(Order::End);
                    news.send(News::Over(code))
                }
                Err(error) => {
                    orders.give(Order::End);
                    // Nobody hears it where the agent has left.
                    let _ = news.send(News::Lost(error.to_string()));
                    return;
                }
            };
            if passed_on.is_err() {
                return;
            }
        }
    };
    spawn("coordinator", listening)
}

/// Tells the coordinator that this node is there, and once, when that is so, that it leaves.
fn pulse(writer: SharedWriter, orders: Orders) -> Result<(), LaunchError> {
    let beating = move || {
        let mut said = false;
        let mut last = Instant::now();
        loop {
            std::thread::sleep(TICK);
            let message = match orders.heard().filter(|_| !said) {
                Some(signal) => {
                    said = true;
                    FromAgent::Leaving { why: format!("its agent got signal {signal}") }
                }
                None if last.elapsed() >= PULSE => FromAgent::Alive,
                None => continue,
            };
            last = Instant::now();
            let mut writer = writer.lock().unwrap_or_else(PoisonError::into_inner);
            if writer.send(&message).is_err() {
                // Its reader notices as well.
                return writer.close();
            }
        }
    };
    spawn("pulse", beating)
}

fn spawn(name: &str, body: impl FnOnce() + Send + 'static) -> Result<(), LaunchError> {
    let spawned = std::thread::Builder::new().name(name.to_owned()).stack_size(256 << 10).spawn(body);
    spawned.map(drop).map_err(|source| LaunchError::System { action: "start a thread", source })
}
