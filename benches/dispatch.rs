//! How late requests go out after their slots: `cargo bench --bench dispatch`, about a minute, no network.
//!
//! Three lines for each case, from the ground up: a thread that sleeps in the kernel (what the machine can do), a task
//! that sleeps by the alarm, and requests that wait in a lane over the embedded store. What lies between two lines is
//! what that layer adds. Each case is run idle and beside two busy threads.

#![allow(
    clippy::disallowed_methods,
    reason = "a benchmark times what it runs, and waits for it"
)]

use std::{
    hint::black_box,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    thread,
    time::Duration,
};

use paceline::{
    pacing::{
        alarm::Alarm,
        lane::{Call, Lane, Name},
        pacer::{Arrival, Settings},
        throttle::Rules,
        time::{LocalTime, MILLISECOND, Nanos, SECOND, nanos},
    },
    store::Store,
};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};

const CASE: Duration = Duration::from_secs(3);
const BUSY_THREADS: usize = 2;
/// Callers in a lane: enough that somebody always waits.
const CALLERS: u64 = 4;
/// The goal, for 7/s on an idle machine.
const MOST_LATE: Nanos = MILLISECOND / 2;

fn main() {
    let runtime = tokio::runtime::Runtime::new().expect("a runtime, as the program has one");
    let mut fine = true;
    println!(
        "{:<6} {:>7} {:<8} {:>9} {:>9} {:>9} {:>8}",
        "", "rate/s", "layer", "p50 us", "p99 us", "most us", "samples"
    );
    for busy in [false, true] {
        let load = busy.then(Load::start);
        // Of the slow rates several side by side, for more samples; the machine stays idle all the same.
        for (rate, lanes) in [(7, 8), (20, 4), (1_000, 1)] {
            let interval = SECOND / rate;
            let row = |layer: &str, mut late: Vec<Nanos>| {
                late.sort_unstable();
                let at = |p: usize| late[(late.len() * p / 100).min(late.len() - 1)];
                println!(
                    "{:<6} {rate:>7} {layer:<8} {:>9.1} {:>9.1} {:>9.1} {:>8}",
                    if busy { "busy" } else { "idle" },
                    micro(at(50)),
                    micro(at(99)),
                    micro(at(100)),
                    late.len()
                );
                at(99)
            };
            row("thread", kernel(interval));
            row("alarm", runtime.block_on(alarm(interval)));
            let p99 = row("lane", runtime.block_on(lanes_at(interval, lanes)));
            fine &= busy || rate != 7 || p99 < MOST_LATE;
        }
        drop(load);
    }
    println!(
        "goal: at 7/s on an idle machine p99 under {} us: {}",
        micro(MOST_LATE),
        if fine { "met" } else { "MISSED" }
    );
    if !fine {
        std::process::exit(1);
    }
}

fn micro(span: Nanos) -> f64 {
    span as f64 / 1e3
}

/// The instants of a case, one interval apart.
fn instants(interval: Nanos) -> impl Iterator<Item = LocalTime> {
    let began = LocalTime::now();
    let end = began.plus(nanos(CASE));
    (1..)
        .map(move |n| began.plus(interval.saturating_mul(n)))
        .take_while(move |at| *at <= end)
}

fn kernel(interval: Nanos) -> Vec<Nanos> {
    let timer = timerfd_create(TimerfdClockId::Boottime, TimerfdFlags::CLOEXEC).expect("a timer");
    let spec = |t: Nanos| Timespec {
        tv_sec: t / SECOND,
        tv_nsec: t % SECOND,
    };
    instants(interval)
        .map(|at| {
            let once = Itimerspec {
                it_interval: spec(0),
                it_value: spec(at.0),
            };
            timerfd_settime(&timer, TimerfdTimerFlags::ABSTIME, &once).expect("an instant");
            rustix::io::read(&timer, &mut [0u8; 8]).expect("the timer fires");
            LocalTime::now().since(at)
        })
        .collect()
}

async fn alarm(interval: Nanos) -> Vec<Nanos> {
    let alarm = Alarm::start().expect("a timer");
    // On a worker, as all of the program is: the thread that waits for the runtime is none.
    let sleeps = tokio::spawn(async move {
        let mut late = Vec::new();
        for at in instants(interval) {
            alarm.sleep_until(at).await;
            late.push(LocalTime::now().since(at));
        }
        late
    });
    sleeps.await.expect("sleeps that do not fail")
}

async fn lanes_at(interval: Nanos, lanes: u64) -> Vec<Nanos> {
    let alarm = Alarm::start().expect("a timer");
    let voided = Arc::new(AtomicU64::new(0));
    let settings = Settings {
        interval,
        max_in_flight: None,
        queue_limit: 1_000,
        shares: 1,
    };
    let end = LocalTime::now().plus(nanos(CASE));
    let mut callers = Vec::new();
    for n in 0..lanes {
        let lane = Lane::new(
            Name {
                destination: "bench".into(),
                cursor: format!("{n}"),
                key: format!("bench:{n}"),
                throttle_key: format!("throttle:{n}"),
                ceiling: 1e6,
            },
            (settings, Rules::default()),
            Store::Memory(Default::default()),
            alarm.clone(),
            voided.clone(),
            None,
        );
        for client in 0..CALLERS {
            callers.push(tokio::spawn(call(lane.clone(), client, end)));
        }
    }
    let mut late = Vec::new();
    for caller in callers {
        late.extend(caller.await.expect("a caller that does not fail"));
    }
    late
}

/// One request after the other; how late each went out.
async fn call(lane: Arc<Lane>, client: u64, end: LocalTime) -> Vec<Nanos> {
    let mut late = Vec::new();
    while LocalTime::now() < end {
        let arrival = Arrival {
            client,
            urgency: 3,
            deadline: end.plus(10 * SECOND),
            target: 1,
        };
        let Ok(mut ticket) = lane.enter(arrival) else {
            break;
        };
        loop {
            match ticket.next().await {
                Ok(Call::Connect) => ticket.ready(false),
                Ok(Call::Go(pass)) => match pass.depart() {
                    Ok(departure) => {
                        late.push(departure.lateness());
                        break;
                    }
                    Err(again) => ticket = *again,
                },
                Err(_) => return late,
            }
        }
    }
    late
}

/// Threads that never rest, until dropped.
struct Load {
    done: Arc<AtomicBool>,
    threads: Vec<thread::JoinHandle<()>>,
}

impl Load {
    fn start() -> Load {
        let done = Arc::new(AtomicBool::new(false));
        let spin = |done: Arc<AtomicBool>| {
            let mut n = 0u64;
            while !done.load(Relaxed) {
                n = black_box(n.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1));
            }
        };
        let threads = (0..BUSY_THREADS)
            .map(|_| {
                let done = done.clone();
                thread::spawn(move || spin(done))
            })
            .collect();
        Load { done, threads }
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.done.store(true, Relaxed);
        for thread in self.threads.drain(..) {
            // A thread that only counts cannot have panicked.
            let _ = thread.join();
        }
    }
}
