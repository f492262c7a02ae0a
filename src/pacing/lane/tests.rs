use std::{
    pin::pin,
    task::{Context, Poll, Waker},
};

use super::*;
use crate::{
    pacing::{
        throttle::Rules,
        time::{MILLISECOND, SECOND},
    },
    store::memory::Cursors,
};

fn settings(max_in_flight: Option<usize>) -> Settings {
    Settings {
        interval: 1,
        max_in_flight,
        queue_limit: 10,
        shares: 1,
    }
}

fn lane(max_in_flight: Option<usize>) -> Arc<Lane> {
    let name = Name {
        destination: "d".into(),
        cursor: "d".to_owned(),
        key: "d".to_owned(),
        throttle_key: "d".to_owned(),
        ceiling: 1e9,
    };
    Lane::new(
        name,
        (settings(max_in_flight), Rules::default()),
        Store::Memory(Cursors::default()),
        Alarm::start().expect("a timer"),
        Arc::default(),
        None,
    )
}

/// A request with a connection.
fn enter(lane: &Arc<Lane>) -> Ticket {
    let arrival = Arrival {
        client: 1,
        urgency: 3,
        deadline: LocalTime::now().plus(10 * SECOND),
        target: 1,
    };
    let mut ticket = lane.enter(arrival).expect("there is room");
    assert!(matches!(look(&mut ticket), Some(Call::Connect)));
    ticket.ready(false);
    ticket
}

/// What it is told without waiting.
fn look(ticket: &mut Ticket) -> Option<Call> {
    match pin!(ticket.next()).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(call) => Some(call.expect("not refused")),
        Poll::Pending => None,
    }
}

async fn depart(mut ticket: Ticket) -> Departure {
    let told = tokio::time::timeout(std::time::Duration::from_secs(10), ticket.next());
    match told.await.expect("its turn comes").expect("not refused") {
        Call::Go(pass) => pass.depart().expect("the slot is fresh"),
        Call::Connect => panic!("it has a connection"),
    }
}

#[tokio::test]
async fn a_request_that_has_ended_is_under_way_no_longer() {
    let lane = lane(None);
    let (one, two) = (depart(enter(&lane)).await, depart(enter(&lane)).await);
    assert_eq!(lane.lock().pacer.in_flight(), 2);
    drop(one);
    assert_eq!(lane.lock().pacer.in_flight(), 1);
    drop(two);
    let past = LocalTime::now().plus(MILLISECOND);
    while LocalTime::now() < past {
        std::hint::spin_loop();
    }
    assert!(lane.is_forgettable());
}

#[tokio::test]
async fn whoever_waits_for_the_end_of_another_request_is_told_of_it() {
    // Also where, at the time of its departure, nobody could wait for it.
    for at_first in [Some(1), None] {
        let lane = lane(at_first);
        let under_way = depart(enter(&lane)).await;
        lane.reconfigure((settings(Some(1)), Rules::default()), 1e9);
        let mut next = enter(&lane);
        assert!(look(&mut next).is_none(), "one is under way");
        // The driver has nothing more to do than to wait for its deadline.
        while lane.lock().armed.is_none_or(|at| at < LocalTime::now()) {
            tokio::task::yield_now().await;
        }
        drop(under_way);
        drop(depart(next).await);
    }
}
